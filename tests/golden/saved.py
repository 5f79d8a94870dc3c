"""The golden checkpoints as they lie on the disk: their folders, their configs, and how one is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import transformers

from hf_attn_swap.saved.shim import stock_name

from .make import checkpoints

CHECKPOINTS = checkpoints()


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def entries(folder: Path) -> list[dict[str, Any]]:
    """What the config says of the swaps."""
    swaps: list[dict[str, Any]] = config_of(folder)["attn_swap"]["swaps"]
    return swaps


def load(folder: Path) -> Any:
    cls = getattr(transformers, stock_name(transformers.AutoConfig.from_pretrained(folder).architectures[0]))
    return cls.from_pretrained(folder)
