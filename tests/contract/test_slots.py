"""`outeffhop(n=, beta=)`: n slots of score 0 and an inverse temperature (OutEffHop, eq. 2.11, remarks 2.1 and 2.3)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.kernels import dispatch
from hf_attn_swap.kernels.dispatch import Form
from tests.reference import reference_model

from .harness import assert_same, batch_of, fresh, padding_side, refused, run

OPTIONS: list[dict[str, Any]] = [{"n": 2}, {"n": 4.0, "beta": 1.5}, {"n": 2.5}, {"n": 40, "beta": 0.25}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("family", "strength"), [("bert", 1.0), ("llama", 1.0), ("llama", 0.5)])
@pytest.mark.parametrize("form", [Form.RESCALED, Form.ZERO_KEY])
@pytest.mark.parametrize("padded", [False, True])
def test_every_form_is_the_paper_s_formula(
    options: dict[str, Any], family: str, strength: float, form: Form, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients: by the log-sum-exp, and by zero keys where no kernel gives one."""
    if form is Form.ZERO_KEY:
        monkeypatch.setattr(dispatch, "kernels", lambda *_: ())
    batch = batch_of(family, padded=padding_side(family) if padded else None)
    model = patch_model(fresh(family), "outeffhop", strength=strength, **options)
    wanted = reference_model(fresh(family), "outeffhop", options=options, strength=strength)
    assert_same(run(model, batch), run(wanted, batch))


@pytest.mark.parametrize("variant", ["outeffhop+clipped_softmax", "sink+outeffhop", "modern_hopfield+outeffhop"])
def test_compositions_have_the_slots(variant: str) -> None:
    """beta scales the products with the keys of a sink, too, and the clip has a strength of its own."""
    options, batch = {"outeffhop": {"n": 3, "beta": 0.5}}, batch_of("llama", padded="left")
    for strength in (0.5, 1.0):
        model = patch_model(fresh("llama"), variant, strength=strength, **options)
        own = [
            {name: value.detach() for name, value in module.named_parameters()}
            for name, module in model.named_modules()
            if name.endswith("attn_swap")
        ]
        wanted = reference_model(fresh("llama"), variant, options=options, strength=strength, parameters=own)
        assert_same(run(model, batch), run(wanted, batch))


def test_beta_is_a_factor_of_the_queries() -> None:
    """With beta = 2 the model computes as the one whose query projections are twice as large: the same bits."""
    doubled, batch = fresh("bert"), batch_of("bert", padded="right")
    with torch.no_grad():
        for layer in doubled.bert.encoder.layer:
            for parameter in layer.attention.self.query.parameters():
                parameter.mul_(2)
    got = run(patch_model(fresh("bert"), "outeffhop", beta=2), batch)[0]
    assert torch.equal(got, run(patch_model(doubled, "outeffhop"), batch)[0])


def test_what_is_no_number_above_0_is_refused() -> None:
    for name, value in itertools.product(("n", "beta"), (-1, 0, float("nan"), float("inf"), "2")):
        with refused("outeffhop: ", f"{name} must be"):
            patch_model(fresh("bert"), "outeffhop", **{name: value})
