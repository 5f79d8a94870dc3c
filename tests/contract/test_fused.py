"""The fused form of every variant equals its readable form, and the tests check that the fused form ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_attn_swap import describe
from hf_attn_swap.kernels import weighted
from hf_attn_swap.kernels.dispatch import Form
from hf_attn_swap.layer import compute
from tests import zoo
from tests.harness.places import turns

from .cells import COMPOSED, FAMILY_NAMES, LINEAR, ONCE, OPTIONS, Cell, is_linear, over_in_turn, swap_in
from .harness import (
    CAUSAL_FAMILIES,
    LENGTH,
    TEXT_FAMILIES,
    Recorder,
    assert_identical,
    assert_same,
    batch_of,
    forward,
    fresh,
    padding_side,
    run_all,
    swapped,
)  # fmt: skip

SDPA = ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu")
POSITIONS = {"gpt2": "n_positions"}


def runs(model: Any) -> set[str]:
    return {row.runs for row in describe(model).rows}


def is_reference(model: Any) -> bool:
    (words,) = runs(model)
    return words.startswith("reference")


def forbid_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("the fused form did not run")

    monkeypatch.setattr(compute, "reference", forbidden)


def count_references(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each time that the readable pipeline runs."""
    calls: list[int] = []
    readable = compute.reference
    monkeypatch.setattr(compute, "reference", lambda *given: calls.append(1) or readable(*given))
    return calls


def force_reference(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every scored layer runs the readable pipeline; products under any mask, for variants without scores."""
    seen: list[int] = []
    attend = compute.attend

    def readable(places: Any, inputs: Any, call: Any, sdpa: Any, want_weights: bool) -> tuple[Tensor, Tensor | None]:
        seen.append(1)
        return attend(places, inputs, call, sdpa, True)

    replaced = compute.replaced

    def readable_products(variant: Any, inputs: Any, call: Any, want_weights: bool) -> tuple[Tensor, Tensor | None]:
        seen.append(1)
        return replaced(variant, inputs, call, True)

    monkeypatch.setattr("hf_attn_swap.layer.swap.attend", readable)
    monkeypatch.setattr("hf_attn_swap.layer.swap.replaced", readable_products)
    return seen


@over_in_turn(ONCE + COMPOSED + OPTIONS, ("padded", "strength"), [(False, 1.0), (True, 1.0), (True, 0.5)])
def test_fused_equals_reference(
    family: str, padded: bool, cell: Cell, strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is no fused form, the readable one runs by itself, and asking for the weights changes no bit."""
    model = swapped(family, cell, strength)
    batch = batch_of(family, padded=padding_side(family) if padded else None)
    without_fused_form = is_reference(model)
    with monkeypatch.context() as patched:
        if without_fused_form:
            calls = count_references(patched)
        else:
            forbid_reference(patched)
        by_default = run_all(model, batch)
    seen = force_reference(monkeypatch)
    readable = run_all(model, batch)
    assert len(seen) == model.config.num_hidden_layers
    if without_fused_form:
        assert len(calls) == model.config.num_hidden_layers
        assert_identical(by_default, readable)
    else:
        assert_same(by_default, readable)


def test_variants_that_have_a_fused_form() -> None:
    names = (
        "outeffhop",
        "belief",
        "gated",
        "modern_hopfield",
        "simpletron_resl",
        "belief+outeffhop",
        "gated+outeffhop",
    )
    assert not [name for name in names if is_reference(swapped("bert", (name, {})))]


@over_in_turn(ONCE + COMPOSED, "grad", [True, False])
def test_what_describe_says_is_what_runs(family: str, cell: Cell, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fused primitive is called once per layer, and a layer that is fused never makes the weights itself."""
    model, batch = swapped(family, cell), batch_of(family, padded=padding_side(family))
    (words,) = runs(model)
    layers = model.config.num_hidden_layers
    calls, in_blocks = count_references(monkeypatch), []
    attend = weighted.attend
    monkeypatch.setattr(weighted, "attend", lambda *given: in_blocks.append(1) or attend(*given))
    with torch.set_grad_enabled(grad), Recorder() as seen:
        model(**batch)
    if words.startswith("reference"):
        assert len(calls) == layers
        return
    assert not calls
    expected = "baddbmm" if "baddbmm" in words else "SDPA" if "SDPA" in words else "reordered products"
    if words.startswith(Form.WEIGHTED.value):
        assert len(in_blocks) == layers
        assert seen.count(*SDPA, "softmax", "_softmax") == 0
    elif expected == "baddbmm":
        unread = 0 if grad or family == "albert" else 1  # ALBERT does not know its last call
        assert seen.count("baddbmm") == layers - unread
        assert seen.count("softmax") == (layers if grad else 0)
        assert seen.count("scaled_dot_product_attention") == (0 if grad else layers)
    elif expected == "SDPA":
        assert seen.count(*SDPA) == layers * (2 if "once more" in words else 1)
        assert seen.count("softmax") == 0
    else:
        assert is_linear(cell[0])
        assert seen.count(*SDPA, "softmax", "_softmax") == 0, "linear attention computes no softmax at strength 1"


@pytest.mark.parametrize(("family", "padded"), turns(TEXT_FAMILIES, [None, "right", "left"]))
def test_linear_attention_never_builds_queries_times_keys(family: str, padded: str | None) -> None:
    length = 300
    model = swap_in(
        fresh(family, torch.float32, **{POSITIONS.get(family, "max_position_embeddings"): length}), LINEAR[-1]
    )
    batch = zoo.inputs(family, batch=2, length=length, padded=padded)
    with torch.no_grad(), Recorder() as seen:
        model(**batch)
    assert any(length in shape for shape in seen.shapes)
    assert not [shape for shape in seen.shapes if sum(size >= length for size in shape) > 1]


def allowed(family: str, batch: dict[str, Any], keys: int) -> Tensor:
    """(B,1,Q,K): where a query may look."""
    rows = len(next(iter(batch.values())))
    mask = torch.ones(rows, 1, keys, keys, dtype=torch.bool)
    if "attention_mask" in batch:
        mask &= batch["attention_mask"].bool()[:, None, None, :]
    return mask.tril() if family in CAUSAL_FAMILIES else mask


@over_in_turn(ONCE, ("padded", "strength"), [(False, 1.0), (True, 1.0), (True, 0.0)])
def test_weights_on_request(family: str, padded: bool, cell: Cell, strength: float) -> None:
    """(B,H,Q,K) per layer, zeros where masked, the rows of normalized variants sum to at most 1; same outputs."""
    model = swapped(family, cell, strength)
    batch = batch_of(family, padded=padding_side(family) if padded else None)
    wanted = forward(model, batch)
    with torch.no_grad():
        out = model(**batch, output_attentions=True)
    assert len(out.attentions) == model.config.num_hidden_layers
    keys = out.attentions[0].shape[-1]
    assert keys == LENGTH or padding_side(family) is None
    mask = allowed(family, batch, keys)
    for weights in out.attentions:
        assert weights.shape == (len(mask), model.config.num_attention_heads, keys, keys)
        assert weights.isfinite().all()
        assert not weights.masked_select(~mask).any()
        assert weights.masked_select(mask).any()
        if not is_linear(cell[0]) or strength == 0:
            assert (weights >= 0).all()
            assert float(weights.sum(-1).max()) <= (1.2 if "clipped_softmax" in cell[0] else 1) + 1e-12
    again = forward(model, batch, output_attentions=True)
    assert (again - wanted).abs().max() <= 1e-12 * wanted.abs().max().clamp_min(1)
    assert model(**batch).get("attentions") is None


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_weights_of_the_control_are_those_of_eager_attention(family: str) -> None:
    model, stock = swap_in(fresh(family), "softmax"), fresh(family)
    stock.set_attn_implementation("eager")
    causal = family in CAUSAL_FAMILIES  # there stock eager gives NaN for float64 rows that may see nothing
    batch = batch_of(family, padded=None if causal else padding_side(family))
    with torch.no_grad():
        got, wanted = (runner(**batch, output_attentions=True).attentions for runner in (model, stock))
    padding = batch.get("attention_mask", torch.ones(1, 1))[:, None, :, None] == 0
    for one, other in zip(got, wanted, strict=True):  # eager softmax rounds to fp32 in most families
        assert (one - other).masked_fill(padding, 0).abs().max() <= 1e-6
