"""A conversion in a process of its own, alone or one of several; test_convert_fsdp runs it.

Arguments: the case, the folder, the file of the result, the rows per step of each process, and the training step at
which the last process is killed (0: none).
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

import torch
from safetensors.torch import save_file
from transformers import TrainingArguments

from hf_attn_swap.conversion import lesson
from hf_attn_swap.conversion.stages import Distil
from hf_attn_swap.conversion.steps.distil import StopWithin

from .converting import converted, rows, stock, timeless, weights

STEP = Distil(learning_rate=2e-3, hidden=1.0)
CASES: dict[str, tuple[str, str, Distil, dict[str, Any]]] = {
    "adapters": ("llama", "outeffhop+gated", replace(STEP, rank=4), {}),
    "body": ("bert", "simpletron_resl", STEP, {"max_loss": 1e-12, "layers": [0, 1, 2]}),
    "all": ("llama", "outeffhop", replace(STEP, trainable=("all",)), {}),
    "carried": ("bert", "modern_hopfield", STEP, {"keep": 0.4}),
    "low_memory": ("llama", "outeffhop+gated", replace(STEP, rank=4), {"low_memory": True}),
    "window": ("llama", "window", replace(STEP, rank=4), {"heads": "auto", "keep": 0.5, "window": 2}),
    "bits": ("llama", "outeffhop+gated", STEP, {"bits": 8, "tokens": 384}),
    "bf16": ("llama", "outeffhop+gated", replace(STEP, rank=4), {}),
    "layers": ("llama", "outeffhop+gated", replace(STEP, layers=0.5), {}),
    "half": ("llama", "outeffhop+gated", replace(STEP, rank=4), {}),
}


def main(case: str, folder: str, result: str, batch: int, last: int) -> None:
    warnings.filterwarnings("ignore")
    lesson.SAVE_EVERY = 2
    real = StopWithin.on_step_end

    def killed(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        real(self, args, state, control, **kwargs)
        if last == state.global_step and args.process_index == args.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    StopWithin.on_step_end = killed  # type: ignore[method-assign]
    name, variant, stage, more = CASES[case]
    model = stock(name)
    if case == "half":
        model.to(torch.bfloat16)
    args = TrainingArguments(
        output_dir=folder,
        report_to="none",
        use_cpu=True,
        bf16=case in ("bf16", "half"),
        ddp_backend="gloo" if "WORLD_SIZE" in os.environ else None,
    )
    data = rows(name, 40)
    more = {"tokens": 192, **more, "output_dir": folder, "args": args, "stages": [replace(stage, batch=batch)]}
    report = converted(model, variant, data, **more)
    if args.should_save:
        save_file({name: each.clone().contiguous() for name, each in weights(model).items()}, result)
        Path(result).with_suffix(".json").write_text(json.dumps(timeless(report)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
