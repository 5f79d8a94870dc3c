"""A snapshot gives swaps and weights back what they were, also through a file of plain data and tensors."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.conversion.journal import Snapshot, given_back, taken
from hf_attn_swap.layer.calibration import Calibration
from hf_attn_swap.layer.swap import Swap
from hf_attn_swap.layer.value_scale import ValueScale
from tests.contract.harness import perturb, swaps

from .converting import same, stock, weights


def changed(model: Any) -> None:
    """Other strengths, fits, parameters of the variant, and weights."""
    with torch.no_grad():
        for swap in swaps(model):
            swap.drop(ValueScale.name)
            swap.put(Calibration("map", swap.geometry))
            for parameter in swap.parameters():
                parameter += 1
        swaps(model)[1].compute_at(0.5)
        swaps(model)[2].retrained = True
        model.get_input_embeddings().weight *= 2


def held(model: Any) -> dict[int, list[Swap]]:
    return dict(enumerate([swap] for swap in swaps(model)))


@pytest.mark.parametrize("written", [False, True])
def test_given_back(written: bool) -> None:
    model = perturb(patch_model(stock("bert"), "modern_hopfield+gated", strength=0.75))
    for swap in swaps(model):
        swap.put(ValueScale(swap.geometry))
    swaps(model)[0].put(Calibration("gain", swaps(model)[0].geometry))
    before, specs = weights(model), [swap.spec() for swap in swaps(model)]
    kept = swaps(model)[1].fitted
    snapshot = taken(held(model), [model.get_input_embeddings().weight])
    if written:
        plain, tensors = json.loads(json.dumps(snapshot.held)), snapshot.named(model)
        assert sum(name.startswith("weight ") for name in tensors) == 1
        snapshot = Snapshot.read(plain, tensors, snapshot.changed, model)
    given_back(snapshot, held(model))
    assert swaps(model)[1].fitted == kept, "a fit that stays keeps its module"
    changed(model)
    assert not same(weights(model), before)
    given_back(snapshot, held(model))
    assert same(weights(model), before)
    assert [swap.spec() for swap in swaps(model)] == specs
