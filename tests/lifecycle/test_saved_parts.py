"""A part of a patched model, or another head on it, saves a block of its own and loads to the same function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_attn_swap import describe, list_variants, patch_model, unpatch_model
from hf_attn_swap.patch import need_installation
from tests import zoo
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, forward, fresh, perturb, swaps

from .composite import PARTS, PER_PLACE, make, out
from .steps import heads

RIGHT = {"attn_swap", "attn_implementation"}


def patched(model: Any, variant: str, **arguments: Any) -> Any:
    """The model with this variant, or with one that fits where this variant does not fit all of the model."""
    try:
        return perturb(patch_model(model, variant, **arguments))
    except ValueError as refusal:
        pytest.skip(f"refused when patched: {refusal}")


@pytest.mark.parametrize("variant", PER_PLACE)
@pytest.mark.parametrize(("whole", "path"), PARTS)
def test_a_part_loads_to_what_ran(whole: str, path: str, variant: str, tmp_path: Path) -> None:
    model = patched(make(whole), variant, strength=0.7)
    before = json.dumps(model.config.to_dict(), default=str)
    part = model.get_submodule(path)
    wanted = out(part)
    assert not torch.allclose(wanted, out(make(whole).get_submodule(path)), atol=1e-3)
    part.save_pretrained(tmp_path)
    assert {key: value for key, value in json.loads(before).items() if key in RIGHT} == {
        key: value for key, value in model.config.to_dict().items() if key in RIGHT
    }
    loaded = type(part).from_pretrained(tmp_path)
    assert torch.equal(out(loaded), wanted)
    assert [swap.spec() for swap in swaps(loaded)] == [swap.spec() for swap in swaps(part)]
    assert torch.equal(out(part), wanted)
