"""Conversions in a process of its own, alone or one of several; test_convert_fsdp runs it.

Arguments: the folder of the results, the rows per step of each process, the training step after which the last process
is killed (0: none), and the cases.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import TrainingArguments

from hf_attn_swap import quantize
from hf_attn_swap.conversion import distill
from hf_attn_swap.conversion.distill import StopWithin
from hf_attn_swap.conversion.stages import Distil

from .converting import converted, rows, stock, timeless, weights

STEP = Distil(learning_rate=2e-3, hidden=1.0)
CALM = replace(STEP, learning_rate=3e-4)
ADAPTERS = replace(STEP, rank=4)
GATES = "outeffhop+gated"
CASES: dict[str, tuple[str, str, Distil, dict[str, Any]]] = {
    "adapters": ("llama", GATES, ADAPTERS, {}),  # and gates beside them
    "all": ("llama", "outeffhop", replace(STEP, trainable=("all",)), {}),  # the embeddings too
    "tied": ("bert", "outeffhop", replace(CALM, trainable=("all",)), {}),  # a weight and a bias of the head are tied
    "measured": ("bert", "simpletron_resl", STEP, {"max_loss": 1e-12, "layers": [0, 1, 2]}),  # within the training
    "carried": ("bert", "modern_hopfield", CALM, {"keep": 0.4}),
    "layers": ("llama", GATES, replace(STEP, layers=0.5), {}),  # with the values from before the training
    "low_memory": ("llama", GATES, ADAPTERS, {"low_memory": True}),
    "heads": ("llama", "window", ADAPTERS, {"heads": "auto", "keep": 0.5, "window": 2, "sinks": 1}),
    "twice": ("llama", GATES, STEP, {"tokens": 288, "stages": 2}),  # the second training starts from trained weights
    "8 bits": ("llama", GATES, STEP, {"tokens": 384}),
    "bf16": ("llama", GATES, ADAPTERS, {}),
}


def main(folder: Path, batch: int, last: int, cases: list[str]) -> None:
    warnings.filterwarnings("ignore")
    distill.SAVE_EVERY = 2
    real = StopWithin.on_step_end

    def killed(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        real(self, args, state, control, **kwargs)
        if last == state.global_step and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    StopWithin.on_step_end = killed  # type: ignore[method-assign]
    for case in cases:
        name, variant, stage, more = CASES[case]
        args = TrainingArguments(
            output_dir=str(folder / case),
            report_to="none",
            use_cpu=True,
            bf16=case == "bf16",
            ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
        )
        stages = [replace(stage, batch=batch)]
        if more.get("stages") == 2:
            stages = [replace(stages[0], tokens=96), *stages]
        given = {"tokens": 192, **more, "output_dir": folder / case, "args": args, "stages": stages}
        model = stock(name)
        if case == "8 bits":
            report = quantize(model, rows(name, 40), variant=variant, progress=False, **given)
        else:
            report = converted(model, variant, rows(name, 40), **given)
        if args.should_save:
            found = {name: each.clone().contiguous() for name, each in weights(model).items()}
            save_file(found, folder / f"{case}.safetensors")
            (folder / f"{case}.json").write_text(json.dumps(timeless(report)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
