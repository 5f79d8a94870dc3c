"""A variant asks for its strength in the dtype of the tensor that it changes: simple code is right everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.kernels.extra_kv import ExtraKV
from hf_attn_swap.variants.about import About
from hf_attn_swap.variants.base import METHODS, PLACES, Variant, register

from .harness import batch_of, forward, fresh

pytestmark = pytest.mark.usefixtures("registry_as_before")
NAME = "plainest"
WITH_TENSORS = [place for place in PLACES if place != "mask"]  # a window says how far a query sees, in whole numbers


def plainest(place: str, seen: list[tuple[torch.dtype, torch.dtype]]) -> None:
    """Halves what it is given at full strength, as the documentation's example does."""

    def halved(self: Any, tensor: torch.Tensor, call: Any) -> torch.Tensor:
        strength = call.strength_in(tensor.dtype)
        if isinstance(strength, torch.Tensor):
            seen.append((strength.dtype, tensor.dtype))
        changed = tensor * (1 - strength / 2)
        assert changed.dtype == tensor.dtype
        return changed

    def normalized(self: Any, scores: torch.Tensor, call: Any) -> torch.Tensor:
        return halved(self, torch.softmax(scores, -1), call)

    def paired(self: Any, inputs: Any, call: Any) -> ExtraKV:
        groups, width = inputs.key.shape[1], inputs.key.shape[3]
        return ExtraKV(key=halved(self, inputs.query.new_ones(groups, 1, width), call))

    body: dict[str, Any] = {
        "places": (place,),
        "about": About(summary="halved", formula="Y / 2", paper="none", fused="SDPA"),
    }
    body[METHODS[place]] = {"keys": paired, "normalizer": normalized}.get(place, halved)
    register(NAME)(type("Plainest", (Variant,), body))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("place", WITH_TENSORS)
@pytest.mark.parametrize("family", ["bert", "llama"])
def test_every_place_in_every_precision(family: str, place: str, dtype: torch.dtype) -> None:
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    plainest(place, seen)
    stock, batch = fresh(family, torch.float32).to(dtype), batch_of(family, torch.float32)
    wanted = forward(stock, batch)
    model = patch_model(fresh(family, torch.float32).to(dtype), NAME, strength=0.3)
    got = forward(model, batch)
    assert seen
    assert all(strength == tensor for strength, tensor in seen)
    assert got.dtype == dtype
    assert not torch.equal(got, wanted)
    assert torch.equal(forward(set_strength(model, 0.0), batch), wanted)
