"""A swap by itself: what it says of its variants, its strength and its fits, and its place among the layers."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_attn_swap.core.call import ForwardContext, Geometry
from hf_attn_swap.core.kind import Kind
from hf_attn_swap.kernels.dispatch import Form, Setting
from hf_attn_swap.layer.calibration import Calibration
from hf_attn_swap.layer.compute import Places
from hf_attn_swap.layer.registry import fit_options, parse, parse_options
from hf_attn_swap.layer.swap import STEPS, Argument, Phase, Swap, Wiring
from hf_attn_swap.layer.value_scale import ValueScale
from hf_attn_swap.variants.base import PLACES, VARIANTS
from tests.contract.cells import PAIRS, SINGLES
from tests.contract.harness import refused

SIZES = Geometry(heads=4, kv_heads=2, head_dim=3, hidden=12)
WIRING = Wiring(
    path="layer",
    order=2,
    first=False,
    last=False,
    uniform=True,
    states=Argument("states", 0),
    others=(),
    mask=None,
    cache_index=None,
    caches=False,
    borrows=False,
    lent=False,
    dropout_path=None,
)


def swap_of(name: str, strength: float = 1.0, **options: Any) -> Swap:
    classes = parse(name)
    fitted = fit_options(classes, parse_options(classes, options), Kind.ENCODER)
    return Swap(classes, fitted, SIZES, strength=strength)


@pytest.mark.parametrize("name", [*SINGLES, *PAIRS])
def test_what_it_says_of_its_variants(name: str) -> None:
    swap = swap_of(name)
    own = [swap.get_submodule(each) for each in name.split("+")]
    assert swap.variants == tuple(own)
    assert swap.names == tuple(name.split("+"))
    classes = [VARIANTS[each] for each in swap.names]
    changes = {place for variant in swap.variants for place in variant.changes}
    assert swap.carries is ("scores" in changes)
    assert swap.writes is ("write" in changes)
    assert swap.keeps_projection is all(cls.keeps_projection for cls in classes)
    assert swap.projects is any(cls.projects for cls in classes)
    assert swap.wants_residual is any(variant.wants_residual for variant in swap.variants)
    assert swap.further_keys == sum(variant.further_keys for variant in swap.variants)
    assert swap.replacement is (own[0] if classes[0].replaces else None)
    for place in PLACES:
        assert swap.at(place) is next((each for each in swap.variants if place in each.changes), None)
    found = swap.places()
    for place, variant in zip(STEPS, found, strict=False):
        assert variant is next((each for each in swap.variants if place in each.changes), None)
    assert found.span == (own[swap.names.index("window")].span() if "window" in swap.names else None)


def test_a_replica_computes_with_its_own_variants() -> None:
    """DataParallel copies the attributes of a module, and then gives the copy other children."""
    swap = swap_of("gated+sink+outeffhop")
    swap.put(Calibration("gain", SIZES))
    replica = copy.copy(swap)
    replica.__dict__["_modules"] = {name: copy.deepcopy(child) for name, child in swap._modules.items()}
    for place, name in (("read", "gated"), ("keys", "sink"), ("normalizer", "outeffhop")):
        assert replica.at(place) is replica._modules[name] is not swap._modules[name]
    assert replica.places().keys is replica._modules["sink"]
    assert replica.fitted == {"calibration": replica._modules["calibration"]}


@pytest.mark.parametrize(
    ("strength", "never_off", "phase"),
    [
        (1, False, Phase.FULL),
        (0, False, Phase.OFF),
        (0, True, Phase.BETWEEN),
        (0.3, False, Phase.BETWEEN),
        (1.0, True, Phase.FULL),
    ],
)
def test_phases(strength: float, never_off: bool, phase: Phase) -> None:
    swap = swap_of("gated", 0.5)
    swap.compute_at(strength, never_off=never_off)
    assert (swap.strength, swap.phase) == (float(strength), phase)
    assert torch.equal(swap.strength_value, torch.tensor([float(strength)]))
    setting = Setting(device="cpu", dtypes=(torch.float32,) * 3)
    assert (swap.form(setting) is Form.STOCK) == (phase is Phase.OFF)


def test_a_new_swap() -> None:
    swap = swap_of("gated")
    assert (swap.fresh, swap.retrained, swap.wiring, swap.fitted) == (True, False, None, {})
    assert swap.spec() == {"variant": "gated", "options": swap.options, "strength": 1.0}
    swap.retrained, swap.selection = True, "language"
    assert swap.spec() == {
        "variant": "gated",
        "options": swap.options,
        "strength": 1.0,
        "modules": "language",
        "retrained": True,
    }


def test_fits_act_in_the_order_of_their_registration() -> None:
    swap = swap_of("modern_hopfield").eval()
    gain, scale = Calibration("gain", SIZES), ValueScale(SIZES)
    for fit in (gain, scale):
        swap.put(fit)
    assert list(swap.fitted.values()) == [scale, gain]
    assert not gain.training, "in the mode of the layer"
    assert swap.fit_of(ValueScale) is scale
    assert swap.spec()["value_scale"] is True
    before = swap.fitted
    swap.drop(ValueScale.name)
    swap.drop("no such fit")
    assert swap.fit_of(ValueScale) is None
    swap.put(Calibration("map", SIZES))
    swap.restore(before)
    assert swap.fitted == before
    swap.restore({})
    assert swap.fitted == {}


def test_keys_of_a_fit_that_is_not_there_are_unexpected() -> None:
    swap, other = swap_of("outeffhop"), swap_of("outeffhop")
    other.put(Calibration("gain", SIZES))
    found = swap.load_state_dict(other.state_dict(), strict=False)
    assert found.unexpected_keys == ["calibration.weight"]
    assert not other.load_state_dict(other.state_dict()).unexpected_keys


def test_places_among_the_layers() -> None:
    """A module of one layer has its number; one that serves several layers counts its calls, as long as it may."""
    swap, context = swap_of("modern_hopfield"), ForwardContext()
    assert swap.place_in(context) == 0
    assert [swap.is_first(order) for order in (0, 1)] == [True, False]
    swap.wiring = replace(WIRING, first=True)
    assert swap.place_in(context) == 2
    assert swap.is_first(2)
    swap.wiring = WIRING
    assert not swap.is_first(0)
    swap.wiring = replace(WIRING, order=None)
    assert [swap.place_in(context) for _ in range(3)] == [0, 1, 2]
    assert swap.place_in(None) == 0
    assert [swap.is_first(order) for order in (0, 1)] == [True, False]
    context.closed = True
    with refused("computed again after the pass"):
        swap.place_in(context)
    free = swap_of("belief")
    free.wiring = swap.wiring
    assert free.place_in(context) == 3


def test_an_argument_of_a_call() -> None:
    second, named = Argument("mask", 1), Argument("mask", None)
    assert second.of((1, 2), {"mask": 3}) == 2
    assert second.of((1,), {"mask": 3}) == 3
    assert second.of((1,), {}) is None
    assert named.of((1, 2), {"mask": 3}) == 3


def test_the_form_of_several_variants() -> None:
    setting = Setting(device="cpu", dtypes=(torch.float32,) * 3)

    def form(name: str, **facts: Any) -> Form:
        return swap_of(name).form(Setting(**{"device": "cpu", "dtypes": (torch.float32,) * 3, **facts}))

    assert Places().form(setting) is Form.SDPA
    assert form("outeffhop+clipped_softmax") is Form.WEIGHTED
    assert form("outeffhop+clipped_softmax", recorded=True) is Form.REFERENCE
    assert form("modern_hopfield+outeffhop") is Form.REFERENCE, "carried scores have no rule"
    assert form("outeffhop", transformed=True) is Form.REFERENCE
    assert form("simpletron", transformed=True) is Form.PRODUCTS
    assert form("sink") is Form.JOINED
    assert form("sink", dropout=True) is Form.FURTHER_KEYS
    assert form("sink+entmax15") is Form.WEIGHTED
    assert form("belief") is form("softmax") is Form.SDPA
