"""Blocks below the layer that is measured give again what they gave: the same figures to the bit, in fewer calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import replay as module
from hf_attn_swap.conversion import sensitivity
from hf_attn_swap.conversion.replay import Replay
from hf_attn_swap.measuring.held_out import HeldOut
from hf_attn_swap.patch import need_installation
from tests.contract.borrowing import IDS, NAMES, build
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, fresh

ROWS = 2
FEW = {"window": {"window": 2}}


def patched(name: str, variant: str) -> Any:
    return patch_model(fresh(name, torch.float32), variant, **FEW.get(variant, {}))


def held_out(model: Any, name: str) -> HeldOut:
    rows = [batch_of(name, torch.float32, seed=seed) for seed in range(ROWS)]
    with need_installation(model).stock():
        return HeldOut(model, rows, as_it_is=True, progress=False)


def recorded(model: Any, held: HeldOut) -> Replay | None:
    installation = need_installation(model)
    with installation.strengths_kept():
        installation.set_strength(dict.fromkeys(installation.layers(), 0.0))
        return Replay.of(installation, held)


@contextmanager
def counted(model: Any) -> Iterator[list[str]]:
    """The attention modules that are called inside."""
    calls: list[str] = []
    handles = [
        layer.site.core.register_forward_pre_hook(lambda core, args, path=layer.path: calls.append(path))
        for layer in need_installation(model).layers()
    ]
    yield calls
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("name", [name for name in FAMILY_NAMES if name != "albert"])
def test_layers_cost_the_same_in_fewer_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched(name, "outeffhop")
    held = held_out(model, name)
    with counted(model) as calls:
        lost = sensitivity.layer_sensitivity(model, held, progress=False)
    layers = len(need_installation(model).layers())
    below = sum(range(layers))  # the blocks below each layer
    assert len(calls) == ROWS * ((layers + 2) * layers - below), "recorded, each layer, and all together"
    monkeypatch.setattr(Replay, "of", lambda *_: None)
    assert sensitivity.layer_sensitivity(model, held, progress=False) == lost
    assert len(set(lost.alone.values())) == layers


def test_heads_cost_the_same_in_fewer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched("llama", "window")
    held = held_out(model, "llama")
    with counted(model) as calls:
        lost = sensitivity.head_sensitivity(model, held, progress=False)
    fewer = len(calls)
    monkeypatch.setattr(Replay, "of", lambda *_: None)
    with counted(model) as calls:
        assert sensitivity.head_sensitivity(model, held, progress=False) == lost
    assert fewer < len(calls)


def test_the_forward_methods_are_those_from_before() -> None:
    model = patched("llama", "outeffhop")
    replay = recorded(model, held_out(model, "llama"))
    assert replay is not None
    own = model.model.layers[1].forward
    model.model.layers[1].forward = placed = lambda *args, **kwargs: own(*args, **kwargs)  # as accelerate places one
    with pytest.raises(ArithmeticError), replay.below(3):
        raise ArithmeticError
    assert [vars(layer).get("forward") for layer in model.model.layers] == [None, placed, None]


def test_a_block_may_change_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets a copy, each time."""
    model = patched("llama", "outeffhop")
    for layer in model.model.layers[1:]:
        layer.register_forward_pre_hook(lambda block, args: (args[0].mul_(2),))
    held = held_out(model, "llama")
    assert recorded(model, held) is not None
    lost = sensitivity.layer_sensitivity(model, held, progress=False)
    monkeypatch.setattr(Replay, "of", lambda *_: None)
    assert sensitivity.layer_sensitivity(model, held, progress=False) == lost


@pytest.mark.parametrize("name", NAMES)
def test_layers_that_borrow_keys_of_layers_below(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is not computed lends none, so nothing is replayed."""
    model = patch_model(build(name), "outeffhop")
    with need_installation(model).stock():
        held = HeldOut(model, [{"input_ids": IDS}], as_it_is=True, progress=False)
    lost = sensitivity.layer_sensitivity(model, held, progress=False)
    monkeypatch.setattr(Replay, "of", lambda *_: None)
    assert sensitivity.layer_sensitivity(model, held, progress=False) == lost


@pytest.mark.parametrize("why", ["shared", "carries", "large", "reads another", "a dict for all"])
def test_whole_passes_where_replayed_ones_would_be_others(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "albert" if why == "shared" else "llama"
    model = patched(name, "modern_hopfield" if why == "carries" else "outeffhop")
    if why == "large":
        monkeypatch.setattr(module, "MOST", 10)
    if why == "reads another":
        model.model.layers[1].register_forward_pre_hook(lambda block, args: (args[0] * 2, *args[1:]), prepend=True)
    if why == "a dict for all":
        noted: dict[str, Any] = {}
        for layer in model.model.layers:
            layer.register_forward_pre_hook(
                lambda block, args, kwargs: (args, {**kwargs, "noted": noted}), with_kwargs=True, prepend=True
            )
    assert recorded(model, held_out(model, name)) is None
