"""Checkpoints that earlier versions saved load in this one and give the logits that they gave then.

`python -m tests.golden.make` writes the checkpoint of a new variant; those of released versions stay as they are.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from hf_attn_swap import list_variants
from hf_attn_swap.loading import KEYS, OPTIONAL_KEYS
from hf_attn_swap.patch import need_installation

from .make import FOLDER, checkpoints

CHECKPOINTS = checkpoints()
TOLERANCE = 1e-5  # of the largest logit, in float32: machines order sums differently
LARGEST = 300_000  # bytes of all checkpoints together: every clone carries them


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def entries(folder: Path) -> list[dict[str, Any]]:
    """What the config says of the swaps."""
    swaps: list[dict[str, Any]] = config_of(folder)["attn_swap"]["swaps"]
    return swaps


def load(folder: Path) -> Any:
    cls = getattr(transformers, config_of(folder)["architectures"][0])
    return cls.from_pretrained(folder)


def distance(model: Any, expected: dict[str, Tensor]) -> float:
    """The largest difference to the saved logits, relative to the largest of them."""
    with torch.no_grad():
        logits = model(input_ids=expected["input_ids"]).logits
    return float((logits - expected["logits"]).abs().max() / expected["logits"].abs().max())


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: str(folder.relative_to(FOLDER)))
def test_gives_the_logits_of_then(folder: Path) -> None:
    model, expected = load(folder), load_file(folder / "expected.safetensors")
    assert distance(model, expected) <= TOLERANCE
    if any(entry["variant"] != "softmax" for entry in entries(folder)):
        with need_installation(model).stock():
            assert distance(model, expected) > 100 * TOLERANCE, "a lost swap would not be seen"


def test_every_variant_has_a_checkpoint() -> None:
    alone = {folder.name for folder in CHECKPOINTS if {entry["variant"] for entry in entries(folder)} == {folder.name}}
    assert set(list_variants()) <= alone, "run python -m tests.golden.make, and commit what it writes"


def test_every_key_of_the_config_occurs() -> None:
    found = {key for folder in CHECKPOINTS for entry in entries(folder) for key in entry}
    assert found == KEYS | OPTIONAL_KEYS


def test_small() -> None:
    sizes = [file.stat().st_size for folder in CHECKPOINTS for file in folder.iterdir()]
    assert 0 < sum(sizes) < LARGEST
