"""The command line in a process that is killed without warning at a place while a result is saved.

Arguments: the place, and the words of the command.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_attn_swap.publish import converted
from hf_attn_swap.writing import SAVING
from hf_attn_swap_cli import run

PLACES = ("half of the weights", "before the tokenizer", "before its place", "in its place", "half replaced")


def killed(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def half_saved(save: Callable[..., None]) -> Any:
    """A save that is killed with half of the file of the weights written."""

    def saved(model: PreTrainedModel, folder: Path, **more: Any) -> None:
        save(model, folder, **more)
        if "checkpoint" not in str(folder):
            path = Path(folder, "model.safetensors")
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            killed()

    return saved


def main(place: str, *words: str) -> int:
    if place == "half of the weights":
        PreTrainedModel.save_pretrained = half_saved(PreTrainedModel.save_pretrained)
    elif place == "before the tokenizer":
        converted.copy_preprocessor = killed
    elif place == "before its place":
        Path.rename = killed
    elif place == "in its place":
        rename = Path.rename
        Path.rename = lambda path, to: killed(rename(path, to)) if path.name.endswith(SAVING) else rename(path, to)
    else:
        move = shutil.move
        shutil.move = lambda path, to: killed(move(path, to))
    return run(list(words))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
