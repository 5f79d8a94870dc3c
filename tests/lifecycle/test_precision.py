"""Low precision: autocast, whole models in bf16 and fp16, and a strength that bf16 cannot hold."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_attn_swap import list_variants, patch_model, set_strength
from tests import zoo
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, distance, forward, fresh, perturb, swaps
from tests.harness.places import in_turn, one_per_place, turns

CASTS = {
    "to": lambda model: model.to(torch.bfloat16),
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "there_and_back": lambda model: model.bfloat16().float(),
    "double": lambda model: model.double(),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "state_dict": lambda model: model.load_state_dict(model.state_dict()) and model,
    "assign": lambda model: model.load_state_dict(model.state_dict(), assign=True) and model,
    "meta_and_back": lambda model: model.to("meta").to_empty(device="cpu"),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize(("cast", "name"), turns(tuple(CASTS), FAMILY_NAMES))
def test_strength_survives(name: str, cast: str) -> None:
    model = CASTS[cast](patch_model(fresh(name, torch.float32), "belief_star", strength=0.3))
    for swap in swaps(model):
        assert swap.strength == 0.3
        assert swap.phase == "between"
        assert swap.strength_value.dtype == torch.float32
        assert torch.equal(swap.strength_value, torch.full((1,), 0.3))
    assert model.config.attn_swap["swaps"][0]["strength"] == 0.3


def autocast(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return forward(model, batch)


@in_turn(columns=list_variants())
def test_autocast(name: str, variant: str) -> None:
    """Stock bits at strength 0; otherwise the fp32 result up to a few times what autocast costs the stock model."""
    model, batch = fresh(name, torch.float32), batch_of(name, torch.float32)
    stock = autocast(model, batch)
    cost = distance(stock.float(), forward(model, batch))
    perturb(patch_model(model, variant, strength=0.0))
    assert torch.equal(autocast(model, batch), stock)
    for strength in (0.3, 1.0):
        set_strength(model, strength)
        got = autocast(model, batch)
        assert got.dtype == stock.dtype
        assert distance(got.float(), forward(model, batch)) <= 6 * cost + 0.02


@in_turn()
def test_autocast_training(name: str, variant: str) -> None:
    model = perturb(patch_model(fresh(name, torch.float32), variant, strength=0.3)).train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = zoo.output(model(**batch_of(name, torch.float32))).float().square().mean()
    loss.backward()
    for key, parameter in model.named_parameters():
        if ".attn_swap." in key:
            assert parameter.grad is not None, key
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), key


@pytest.mark.parametrize(
    ("name", "variant", "dtype"),
    [(*row, dtype) for row, dtype in turns(turns(FAMILY_NAMES, one_per_place()), [torch.bfloat16, torch.float16])],
    ids=str,
)
def test_whole_model(name: str, variant: str, dtype: torch.dtype) -> None:
    """Cast before or after patching; the same result, near the fp32 one."""
    wide, batch = fresh(name, torch.float32), batch_of(name, torch.float32)
    narrow_batch = {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
    narrow = copy.deepcopy(wide).to(dtype)
    stock = forward(narrow, narrow_batch)
    cost = distance(stock.float(), forward(wide, batch))
    patch_model(narrow, variant, strength=0.3)
    assert {parameter.dtype for swap in swaps(narrow) for parameter in swap.parameters()} <= {dtype}
    after = patch_model(copy.deepcopy(wide), variant, strength=0.3).to(dtype)
    got = forward(narrow, narrow_batch)
    assert got.dtype == dtype
    assert torch.equal(forward(after, narrow_batch), got)
    assert distance(got.float(), forward(patch_model(wide, variant, strength=0.3), batch)) <= 6 * cost + 0.02
    assert torch.equal(forward(set_strength(narrow, 0.0), narrow_batch), stock)
