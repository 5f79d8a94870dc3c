"""Strength 1 and 0.5 equal the independent slow model of tests/reference.py, in values and gradients."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from hf_attn_swap.variants.base import VARIANTS
from tests import reference
from tests.harness.places import turns

from .cells import (
    COMPOSED,
    DEEP,
    EQUAL,
    EXTRA_CELLS,
    FAMILY_NAMES,
    GRID,
    LARGER,
    OPTIONS,
    PAIRS,
    SINGLES,
    WIDE,
    Cell,
    FamilyCell,
    choices,
    label,
    over,
    over_half,
    over_in_turn,
    shown,
    swap_in,
    text_options,
    unequal,
)  # fmt: skip
from .harness import (
    TEXT_FAMILIES,
    Gradients,
    assert_same,
    batch_of,
    distance,
    fresh,
    neutral,
    padding_side,
    perturb,
    run_all,
    swaps,
)  # fmt: skip

ISSUE = (
    "outeffhop+clipped_softmax",
    "outeffhop+gated",
    "outeffhop+belief",
    "modern_hopfield+belief",
    "modern_hopfield+outeffhop",
)
EVERY_OPTION: tuple[FamilyCell, ...] = tuple(turns(FAMILY_NAMES, EXTRA_CELLS))
EVERY_SET: tuple[FamilyCell, ...] = tuple((family, shown(name)) for family, name in turns(DEEP, LARGER, times=1))
REST = tuple(family for family in FAMILY_NAMES if family not in DEEP)
EVERY_PAIR: tuple[FamilyCell, ...] = tuple((family, shown(name)) for family in DEEP for name in PAIRS)
EVERY_PAIR += tuple((family, shown(name)) for family, name in turns(REST, PAIRS, times=1))


def pair_of_models(family: str, cell: Cell, strength: float, **more: Any) -> tuple[Any, Any, list[dict[str, Any]]]:
    """The patched model, the slow one, and the slow one's leaves for the variant's own parameters."""
    variant, options = cell
    model = perturb(swap_in(fresh(family), variant, strength=strength, **options, **more))
    own = [{name: p.detach().clone().requires_grad_() for name, p in s.named_parameters()} for s in swaps(model)]
    slow = reference.reference_model(fresh(family), variant, options=options, strength=strength, parameters=own, **more)
    return model, slow, own


def gradients_of(own: list[dict[str, Any]], model: Any) -> Gradients:
    """The slow model's gradients of the variant's parameters, under the patched model's names."""
    paths = [path for path, module in model.named_modules() if path.endswith(".attn_swap")]
    pairs = ((f"{path}.{name}", leaf) for path, part in zip(paths, own, strict=True) for name, leaf in part.items())
    return {name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for name, leaf in pairs}


def assert_equals_slow(family: str, cell: Cell, strength: float, padded: bool, **more: Any) -> None:
    batch = batch_of(family, padded=padding_side(family) if padded else None)
    model, slow, own = pair_of_models(family, cell, strength, **more)
    out, gradients = run_all(slow, batch)
    wanted = out, {**gradients, **gradients_of(own, model)}
    assert_same(run_all(model, batch), wanted)


@over(WIDE + EVERY_OPTION + EVERY_SET + EVERY_PAIR)
def test_full_strength(family: str, cell: Cell) -> None:
    assert_equals_slow(family, cell, 1.0, padded=True)


@over_half(WIDE + OPTIONS + COMPOSED)
def test_in_between(family: str, cell: Cell) -> None:
    assert_equals_slow(family, cell, 0.5, padded=True)


@over_in_turn(WIDE + COMPOSED, "strength", [1.0, 0.5], TEXT_FAMILIES)
def test_without_padding(family: str, cell: Cell, strength: float) -> None:
    """No mask at all: other code, with the causal flag."""
    assert_equals_slow(family, cell, strength, padded=False)


@over_in_turn(WIDE, "layers", [[1], [0, 2]], ("bert", "gpt2"))
def test_partial_layers(family: str, cell: Cell, layers: list[int]) -> None:
    assert_equals_slow(family, cell, 1.0, padded=True, layers=layers)


def test_the_issue_names_these() -> None:
    have = {frozenset(name.split("+")) for name in PAIRS}
    assert {frozenset(name.split("+")) for name in ISSUE} <= have
    assert len(LARGER) > 0


def string_options() -> list[tuple[Cell, Cell]]:
    """Each variant with each value of a string option that is not the default, and with the default instead."""
    pairs = []
    for name in SINGLES:
        cls = VARIANTS[name].Options
        for field in dataclasses.fields(cls):
            if isinstance(field.default, str) and field.name not in EQUAL:
                others = [value for value in choices(cls, field.name) if value != field.default]
                numbers = unequal(cls)
                pairs += [((name, {field.name: value, **numbers}), (name, numbers)) for value in others]
    return pairs


@pytest.mark.parametrize("pair", string_options(), ids=lambda pair: label(pair[0]))
@pytest.mark.parametrize("strength", [1.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_every_string_option_has_its_effect(pair: tuple[Cell, Cell], strength: float) -> None:
    """Equal to the slow model, and in some family unlike what the default gives.

    Numbers with equal defaults are unequal here. Behind a post-LayerNorm block the residual stream is the input.
    """
    moved = []
    for family in DEEP:
        batch, found = batch_of(family, padded=padding_side(family)), []
        for cell in pair:
            assert_equals_slow(family, cell, strength, padded=True)
            found.append(run_all(pair_of_models(family, cell, strength)[0], batch)[0])
        moved.append(distance(*found))
    assert max(moved) > 1e-3


@over_half(GRID)
def test_differs_from_stock(family: str, cell: Cell) -> None:
    batch = batch_of(family)
    wanted, wanted_slope = run_all(fresh(family), batch)
    model = perturb(swap_in(fresh(family), cell[0], **text_options(cell)))
    out, slope = run_all(model, batch)
    moved = distance(out, wanted)
    if neutral(model):
        assert_same((out, slope), (wanted, wanted_slope))
    else:
        assert moved > 1e-4
