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
    COVERING,
    DEEP,
    EQUAL,
    LARGEST,
    ONCE,
    OPTIONS,
    SINGLES,
    WIDE,
    Cell,
    FamilyCell,
    choices,
    label,
    over,
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
    forward,
    fresh,
    neutral,
    padding_side,
    perturb,
    run_all,
    swapped,
    swaps,
)  # fmt: skip

EVERY_SET: tuple[FamilyCell, ...] = tuple((family, shown(name)) for family, name in turns(DEEP, LARGEST))


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


@over(WIDE + EVERY_SET)
def test_full_strength(family: str, cell: Cell) -> None:
    assert_equals_slow(family, cell, 1.0, padded=True)


@over(WIDE + COMPOSED)
def test_in_between(family: str, cell: Cell) -> None:
    assert_equals_slow(family, cell, 0.5, padded=True)


@over_in_turn(OPTIONS, "strength", [1.0, 0.5])
def test_options(family: str, cell: Cell, strength: float) -> None:
    assert_equals_slow(family, cell, strength, padded=True)


@over_in_turn(ONCE, "strength", [1.0, 0.5], TEXT_FAMILIES)
def test_without_padding(family: str, cell: Cell, strength: float) -> None:
    """No mask at all: other code, with the causal flag."""
    assert_equals_slow(family, cell, strength, padded=False)


@over_in_turn(tuple(("bert", cell) for cell in COVERING), "layers", [[1], [0, 2]])
def test_partial_layers(family: str, cell: Cell, layers: list[int]) -> None:
    assert_equals_slow(family, cell, 1.0, padded=True, layers=layers)


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
def test_every_string_option_has_its_effect(pair: tuple[Cell, Cell]) -> None:
    """In some family, another output than the default's; each is held to the slow model above.

    Numbers with equal defaults are unequal here. Behind a post-LayerNorm block the residual stream is the input.
    """
    moved = []
    for family in DEEP:
        batch = batch_of(family, padded=padding_side(family))
        moved.append(distance(*(forward(swapped(family, cell), batch) for cell in pair)))
    assert max(moved) > 1e-3


@over(ONCE)
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
