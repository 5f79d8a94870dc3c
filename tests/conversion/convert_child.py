"""A conversion in a process of its own, which may end without warning at a given write of the journal.

Arguments: the folder, the file of the result, the rows per step, and the number of the write to end at (0: none).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import TrainingArguments

from hf_attn_swap.conversion import distill
from hf_attn_swap.conversion.config import Distil
from hf_attn_swap.conversion.journal import Journal

from .converting import converted, rows, stock, timeless, weights


def main(folder: str, result: str, batch: int, last: int) -> None:
    warnings.filterwarnings("ignore")
    distill.SAVE_EVERY = 2
    writes: list[str] = []
    real = Journal.write

    def write(self: Journal, *given: Any) -> None:
        writes.append(given[0])
        if len(writes) == last:
            os._exit(9)
        real(self, *given)

    monkey: Any = Journal
    monkey.write = write
    model = stock("bert")
    backend = "gloo" if "WORLD_SIZE" in os.environ else None
    args = TrainingArguments(
        output_dir=folder, report_to="none", optim="sgd", use_cpu=True, max_grad_norm=0.0, ddp_backend=backend
    )
    stages = [Distil(learning_rate=0.05, hidden=1.0, batch=batch)]
    settings = {"output_dir": folder, "args": args, "stages": stages, "tokens": 432, "fit": "gain"}
    report = converted(model, "simpletron_resl", rows("bert", 40), **settings)
    if args.should_save:
        save_file({name: each.clone().contiguous() for name, each in weights(model).items()}, result)
        Path(result).with_suffix(".json").write_text(json.dumps(timeless(report)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
