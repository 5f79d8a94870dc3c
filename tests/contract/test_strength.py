"""Strength 0 is the pretrained model: bit for bit by the shortcut, to rounding without it, and in the limit."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from hf_attn_swap import describe, patch_model, set_strength
from hf_attn_swap.variants.base import VARIANTS
from tests.harness.places import turns

from .cells import COMPOSED, FAMILY_NAMES, ONCE, OPTIONS, SINGLES, Cell, over_in_turn
from .harness import (
    Gradients,
    assert_identical,
    assert_same,
    batch_of,
    fresh,
    padding_side,
    run,
    swapped,
    swaps,
    without_shortcut,
)  # fmt: skip

DTYPES = (torch.float64, torch.float32)


@functools.cache
def stock(family: str, dtype: torch.dtype, padded: bool) -> tuple[Tensor, Gradients]:
    model = fresh(family, dtype)
    assert model.config._attn_implementation == "sdpa"
    return run(model, batch_of(family, dtype, padding_side(family) if padded else None))


@over_in_turn(ONCE, "dtype", DTYPES)
def test_zero_runs_the_stock_function(family: str, cell: Cell, dtype: torch.dtype) -> None:
    """Without padding and, where there are tokens to pad, with padding."""
    model = swapped(family, cell, 0.0, dtype)
    assert {row.runs for row in describe(model).rows} == {"stock"}
    for padded in {False, padding_side(family) is not None}:
        side = padding_side(family) if padded else None
        assert_identical(run(model, batch_of(family, dtype, side)), stock(family, dtype, padded))


@over_in_turn(ONCE + COMPOSED + OPTIONS, "dtype", DTYPES)
def test_zero_without_the_shortcut(family: str, cell: Cell, dtype: torch.dtype) -> None:
    """Every variant's own path at s = 0: values and gradients of all pretrained parameters."""
    side = padding_side(family)
    model = without_shortcut(swapped(family, cell, 0.0, dtype))
    assert_same(run(model, batch_of(family, dtype, side)), stock(family, dtype, side is not None))


WITH_PARAMETERS = [name for name in SINGLES if VARIANTS[name].about.parameters_added != "none"]


@pytest.mark.parametrize(("family", "name"), turns(FAMILY_NAMES, WITH_PARAMETERS))
def test_neutral_start_of_single_variants(family: str, name: str) -> None:
    """A freshly patched gate is the pretrained model; W_s adds nothing to belief; a sink of zeros is softmax_1."""
    base = {"belief_star": "belief", "sink": "outeffhop"}.get(name, "softmax")
    batch = batch_of(family, padded=padding_side(family))
    model = patch_model(fresh(family), name)
    assert_same(run(model, batch), run(patch_model(fresh(family), base), batch))


def test_a_layer_at_zero_below_one_that_reads_its_scores() -> None:
    """modern_hopfield: a layer switched off still carries its scores upwards, so it must not take the shortcut."""
    model = patch_model(fresh("bert"), "modern_hopfield")
    set_strength(model, 0.0, layers=[0])
    assert [swap.phase for swap in swaps(model)] == ["between", "full", "full"]
    set_strength(model, 0.0)
    assert [swap.phase for swap in swaps(model)] == ["off"] * 3
