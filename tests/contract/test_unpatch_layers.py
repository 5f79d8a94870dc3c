"""Some layers can be unpatched: these are stock to the bit, and the others are as if they alone had been patched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model, unpatch_model
from tests.harness.places import turns

from .cells import FAMILY_NAMES
from .harness import (
    assert_identical,
    assert_same,
    batch_of,
    forward,
    fresh,
    padding_side,
    perturb,
    refused,
    run,
    swaps,
)
from .stock_again import anatomy, assert_stock_again, attentions, tensors

VARIANTS = ("belief_star", "simpletron_res", "modern_hopfield", "outeffhop+gated")
SEVERAL = [name for name in FAMILY_NAMES if name != "albert"]  # ALBERT has one module for all layers


@pytest.mark.parametrize(("family", "variant"), turns(SEVERAL, VARIANTS))
def test_as_if_the_others_alone_had_been_patched(family: str, variant: str) -> None:
    model, other = fresh(family), fresh(family)
    batch = batch_of(family, padded=padding_side(family))
    count = len(swaps(patch_model(model, variant)))
    left = [index for index in range(count) if index != 1]
    assert unpatch_model(model, layers=[1]) is model
    patch_model(other, variant, layers=left)
    for one in (model, other):
        perturb(one)
    parts = [anatomy(one) for one in (model, other)]
    for part in (part for parts_of in parts for part in parts_of.values()):
        part.pop("config")
    assert parts[0] == parts[1]
    assert model.config.attn_swap == other.config.attn_swap
    assert attentions(model) == attentions(other)
    assert "stock" in attentions(model)[1]
    assert_identical(run(model, batch), run(other, batch))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("family", ["albert", "bert"])
def test_all_layers_one_after_another_is_unpatching(family: str, variant: str) -> None:
    model, batch = fresh(family), batch_of(family)
    config, text = model.config, model.config.to_json_string()
    wanted, parts, weights = run(model, batch), anatomy(model), tensors(model)
    count = len(swaps(patch_model(model, variant)))
    for index in reversed(range(count)):
        assert len(swaps(model)) == index + 1
        unpatch_model(model, layers=index)
    assert_stock_again(model, parts, weights, config, text)
    assert_identical(run(model, batch), wanted)
    patch_model(model, variant, layers=[0])
    unpatch_model(model, layers=range(1))
    assert_stock_again(model, parts, weights, config, text)


def test_a_layer_can_be_patched_again() -> None:
    model, batch = patch_model(fresh("bert"), "modern_hopfield"), batch_of("bert")
    unpatch_model(model, layers=[0, 2])
    patch_model(model, "belief", layers=[2])
    assert attentions(model) == ["softmax (stock)", "modern_hopfield", "belief"]
    other = patch_model(patch_model(fresh("bert"), "modern_hopfield", layers=[1]), "belief", layers=[2])
    assert_same(run(model, batch), run(other, batch))


def test_refusals_change_nothing() -> None:
    model, batch = patch_model(fresh("bert"), "modern_hopfield", layers=[0, 2]), batch_of("bert")
    parts, block, wanted = anatomy(model), copy.deepcopy(model.config.attn_swap), forward(model, batch)
    wrong: list[tuple[Any, str]] = [
        ([1], "layers [1] are not swapped; swapped are [0, 2]."),
        ([0, 1], "layers [1] are not swapped; swapped are [0, 2]."),
        ([3], "3"),
        ([-1], "-1"),
        ([], "layers must be whole numbers"),
        ("0", "layers must be whole numbers"),
    ]
    for layers, reason in wrong:
        with refused(reason):
            unpatch_model(model, layers=layers)
        assert anatomy(model) == parts
        assert model.config.attn_swap == block
    assert torch.equal(forward(model, batch), wanted)
    with refused("this model is not patched"):
        unpatch_model(fresh("bert"), layers=[0])
