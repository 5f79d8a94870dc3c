"""What each layer alone costs, against strengths that are set by hand; the model does not change."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.analysis import lost
from hf_attn_swap.conversion import merge_calibration
from hf_attn_swap.conversion.calibrate import calibrate
from hf_attn_swap.conversion.report import Sensitivity
from hf_attn_swap.conversion.sensitivity import layer_sensitivity
from hf_attn_swap.measuring.held_out import HeldOut
from tests.contract.harness import batch_of, fresh, refused, swaps

from .converting import same, stock, weights


def batches(name: str) -> list[dict[str, Any]]:
    return [batch_of(name, stock(name).dtype, seed=seed) for seed in range(2)]


def state(model: Any) -> Any:
    modes = [module.training for module in model.modules()]
    return modes, [(swap.strength, swap.phase) for swap in swaps(model)], copy.deepcopy(model.config.attn_swap)


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("llama", "belief"),
        ("bert", "modern_hopfield"),
        ("vit", "modern_hopfield"),
        ("albert", "modern_hopfield"),
        pytest.param("t5", "belief", marks=pytest.mark.slow),
    ],
)
def test_against_strengths_by_hand(name: str, variant: str) -> None:
    model = patch_model(stock(name), variant).train()
    count = len(swaps(model))
    set_strength(model, 0.5, layers=[0])
    before, values = state(model), weights(model)
    found = layer_sensitivity(model, batches(name), progress=False)
    assert state(model) == before
    assert same(weights(model), values)
    assert found.together == lost(patch_model(stock(name), variant), batches(name))
    for index in range(count):
        alone = patch_model(stock(name), variant)
        set_strength(alone, 0.0)
        set_strength(alone, 1.0, layers=[index])
        assert found.alone[index] == lost(alone, batches(name))
    costs = [found.alone[index].divergence_or_error for index in found.order]
    assert costs == sorted(costs)
    assert sorted(found.order) == list(range(count))
    assert len(set(costs)) == count, "the layers differ, or the test shows nothing"


def test_after_an_error_the_strengths_are_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(stock("llama"), "belief")
    held = HeldOut(model, batches("llama"), progress=False)
    set_strength(model, 0.25)
    before = state(model)
    monkeypatch.setattr(held, "lost", lambda model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layer_sensitivity(model, held, progress=False)
    assert state(model) == before


def test_as_text_html_picture_and_plain_data() -> None:
    found = layer_sensitivity(patch_model(stock("llama"), "belief"), batches("llama"), progress=False)
    lines = str(found).splitlines()
    assert lines[0] == "belief: what each layer alone costs, from the cheapest."
    assert [line.split()[0] for line in lines[2:]] == [str(index) for index in found.order] + ["all"]
    assert found._repr_html_().count("<tr>") == 5
    assert Sensitivity.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    (axes,) = found.plot().axes
    assert [bar.get_height() for bar in axes.patches] == [found.alone[index].degradation for index in range(3)]
    assert axes.get_ylabel() == "perplexity above the stock model's"


def test_refusals() -> None:
    model = patch_model(fresh("bert"), "simpletron_resl", layers=[0, 2])
    batch = batch_of("bert")
    with refused("layers [1] are not swapped; swapped are [0, 2]."):
        layer_sensitivity(model, batch, layers=[1, 2], progress=False)
    with refused("there are no held-out rows"):
        layer_sensitivity(model, [], progress=False)
    with refused("a batch is a dict of tensors as the model takes them, got list"):
        layer_sensitivity(model, [[1]], progress=False)
    with refused("not patched"):
        layer_sensitivity(fresh("bert"), batch, progress=False)
    swaps(model)[0].retrained = True
    with refused("a conversion changed weights of this model; measure the layers before the distillation."):
        layer_sensitivity(model, batch, progress=False)
    swaps(model)[0].retrained = False
    calibrate(model, [batch_of("bert", seed=seed) for seed in range(12)], progress=False)
    merge_calibration(model)
    with refused("a conversion changed weights"):
        layer_sensitivity(model, batch, progress=False)
