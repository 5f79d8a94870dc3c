"""Checkpoints that earlier versions saved load in this one and give the logits that they gave then.

`python -m tests.golden.make` writes the checkpoint of a new variant; those of released versions stay as they are.
"""

from __future__ import annotations

import json
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from hf_attn_swap import list_variants
from hf_attn_swap.layer.fitted import FITTED
from hf_attn_swap.layer.registry import canonical_name, get_variant
from hf_attn_swap.loading import KEYS, OPTIONAL_KEYS
from hf_attn_swap.patch import need_installation

from .make import FOLDER
from .saved import CHECKPOINTS, config_of, entries, load

TOLERANCE = 1e-5  # of the largest logit, in float32: machines order sums differently
LARGEST = 300_000  # bytes of all checkpoints together: every clone carries them


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


def names_of(variant: str) -> list[tuple[str, ...]]:
    """Every way to name the variants of an entry."""
    parts = (get_variant(name) for name in variant.split("+"))
    return list(product(*((cls.name, *cls.aliases) for cls in parts)))


def under_other_names(entry: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The same entry with these names of its variants."""
    options = entry["options"]
    renamed = {new: options[old] for old, new in zip(entry["variant"].split("+"), names, strict=True)}
    return {**entry, "variant": "+".join(names), "options": renamed}


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: str(folder.relative_to(FOLDER)))
def test_loads_under_every_name(folder: Path, tmp_path: Path) -> None:
    """Under each name it gives the logits of then, and says its canonical name."""
    config, expected = config_of(folder), load_file(folder / "expected.safetensors")
    shutil.copytree(folder, tmp_path / "copy")
    for place, entry in enumerate(entries(folder)):
        for names in names_of(entry["variant"]):
            changed = json.loads(json.dumps(config))
            changed["attn_swap"]["swaps"][place] = under_other_names(entry, names)
            (tmp_path / "copy/config.json").write_text(json.dumps(changed))
            model = load(tmp_path / "copy")
            assert distance(model, expected) <= TOLERANCE
            variants = {swap["variant"] for swap in model.config.attn_swap["swaps"]}
            assert variants == {canonical_name(saved["variant"]) for saved in entries(folder)}
            model.save_pretrained(tmp_path / "again")
            again = {swap["variant"] for swap in entries(tmp_path / "again")}
            assert again == variants


def test_every_variant_has_a_checkpoint() -> None:
    alone = {
        canonical_name(folder.name)
        for folder in CHECKPOINTS
        if {entry["variant"] for entry in entries(folder)} == {folder.name}
    }
    assert set(list_variants()) <= alone, "run python -m tests.golden.make, and commit what it writes"


def test_every_key_of_the_config_occurs() -> None:
    keys = {key for folder in CHECKPOINTS for entry in entries(folder) for key in entry}
    assert keys == KEYS | OPTIONAL_KEYS | set(FITTED)


def test_small() -> None:
    sizes = [file.stat().st_size for folder in CHECKPOINTS for file in folder.iterdir()]
    assert 0 < sum(sizes) < LARGEST
