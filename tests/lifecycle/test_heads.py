"""Every model head of every family runs swapped: exactly at strength 0, and differently at 1."""

from __future__ import annotations

import pytest
import torch

from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.layer.registry import tiny_options
from tests.contract.harness import perturb
from tests.harness.heads import CASES, arguments, build, outputs
from tests.harness.places import one_per_place, turns

from .steps import same_bits


@pytest.mark.parametrize(
    ("name", "auto", "variant"), [(*row, variant) for row, variant in turns(CASES, one_per_place())]
)
def test_head(name: str, auto: str, variant: str) -> None:
    model, batch = build(name, auto), arguments(name, auto)
    stock = outputs(model, batch)
    assert len(stock) > 1
    perturb(patch_model(model, variant, strength=0.0, **tiny_options(variant)))
    for got, wanted in zip(outputs(model, batch), stock, strict=True):
        assert same_bits(got, wanted)
    swapped = outputs(set_strength(model, 1.0), batch)
    assert all(torch.isfinite(got).all() for got in swapped)
    control = variant == "softmax"
    for got, wanted in zip(swapped, stock, strict=True):
        assert got.shape == wanted.shape
    assert torch.allclose(swapped[0], stock[0], rtol=1e-6, atol=1e-7) == control, "the head does not see the swap"
    for got, wanted in zip(outputs(unpatch_model(model), batch), stock, strict=True):
        assert same_bits(got, wanted)
