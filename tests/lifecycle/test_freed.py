"""`del model` frees a patched model at once, as it frees a stock one: no cycle waits for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from hf_attn_swap import describe, patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion import calibrate
from tests.contract.harness import batch_of, fresh, run
from tests.harness.places import in_turn


@pytest.fixture(autouse=True)
def _without_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def freed(model: Any) -> list[Any]:
    return [weakref.ref(model), weakref.ref(next(model.parameters())), weakref.ref(model.config)]


@in_turn()
def test_a_patched_model_is_freed(name: str, variant: str) -> None:
    model = patch_model(fresh(name), variant, strength=0.5)
    run(model, batch_of(name))
    describe(model)
    held = freed(model)
    del model
    assert not any(reference() is not None for reference in held)


def test_after_a_second_patch_a_calibration_and_the_way_back() -> None:
    model = patch_model(fresh("bert"), "modern_hopfield")
    patch_model(model, "simpletron_resl", layers=[0])
    calibrate(model, [batch_of("bert")], fit="gain", progress=False)
    set_strength(model, 0.5)
    twin = fresh("bert")
    unpatch_model(patch_model(twin, "belief"))
    held = [*freed(model), *freed(twin)]
    del model, twin
    assert not any(reference() is not None for reference in held)
