"""`torch.compile(fullgraph=True)`: every variant, forward and backward, and how often a schedule recompiles."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import DynamicCache

from benchmarks.bench_caches import with_cache
from hf_attn_swap import describe, list_variants, patch_model, set_strength
from hf_attn_swap.variants.base import VARIANTS
from tests.contract.harness import assert_same, batch_of, distance, forward, fresh, perturb, run_all
from tests.harness.one_swap import one_swap
from tests.harness.places import SMOKES

pytestmark = pytest.mark.usefixtures("_forget_graphs")

FAMILIES = ("bert", "llama")  # fused blocks with LayerNorm, and grouped causal heads


def _way(name: str) -> tuple[Any, ...]:
    """The places that a variant changes, and the form that computes them."""
    return VARIANTS[name].places, describe(patch_model(fresh("bert"), name)).rows[0].runs


WAYS = list({_way(name): name for name in list_variants()}.values())
# One without scores, one that writes the residual stream, and one of the others.
KINDS = {(VARIANTS[name].replaces, "write" in VARIANTS[name].places): name for name in list_variants()}


def compiled(model: Any, backend: Any = "aot_eager") -> Any:
    return torch.compile(model, backend=backend, fullgraph=True)


def eager_and_compiled(name: str, variant: str, strength: float, backend: str) -> None:
    layers = 2 if one_swap((variant, {})).carries else 1
    model = patch_model(fresh(name, torch.float32, num_hidden_layers=layers), variant, strength=strength)
    assert_equals_eager(perturb(model), name, backend)


def assert_equals_eager(model: Any, name: str, backend: str) -> None:
    batch = batch_of(name, torch.float32)
    wanted = run_all(model, batch)
    whole = compiled(model, backend)
    got = run_all(whole, batch)
    assert_same((got[0], {key.removeprefix("_orig_mod."): value for key, value in got[1].items()}), wanted, slack=3)


CELLS = [*zip(itertools.cycle(FAMILIES), itertools.cycle((1.0, 0.4)), WAYS)]


@pytest.mark.parametrize(("name", "strength", "variant"), CELLS)
@pytest.mark.slow
def test_equals_eager(name: str, variant: str, strength: float) -> None:
    eager_and_compiled(name, variant, strength, "aot_eager")


@pytest.mark.slow
def test_layers_of_different_kinds_equal_eager() -> None:
    """One graph has them all: a variant without scores, one of the residual stream in two layers, and another one."""
    linear, writing, other = (KINDS[kind] for kind in ((True, True), (False, True), (False, False)))
    model = fresh("llama", torch.float32, num_hidden_layers=4)
    for variant, layers in ((linear, [0]), (writing, [1, 2]), (other, [3])):
        patch_model(model, variant, layers=layers, strength=0.4)
    assert_equals_eager(perturb(model), "llama", "aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"
)  # Inductor's own import
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("variant", SMOKES)
def test_inductor(name: str, variant: str) -> None:
    eager_and_compiled(name, variant, 1.0, "inductor")


@pytest.mark.slow
@pytest.mark.parametrize("variant", KINDS.values())
def test_a_schedule_recompiles_at_its_two_ends(variant: str) -> None:
    model = patch_model(fresh("bert", torch.float32, num_hidden_layers=1), variant, strength=0.0)
    batch = batch_of("bert", torch.float32)
    backend = CompileCounterWithBackend("eager")
    whole = compiled(model, backend)
    counts = []
    for strength in (0.0, 0.1, 0.5, 0.9, 1.0):
        set_strength(model, strength)
        got = forward(whole, batch)
        assert distance(got, forward(model, batch)) <= 3e-5
        counts.append(backend.frame_count)
    assert counts == [1, 2, 2, 2, 3]


STEPS = ("softmax", "outeffhop", "belief", "sink", "window")


@pytest.mark.slow
@pytest.mark.parametrize("variant", STEPS)
def test_decoding_is_one_graph_as_in_stock(variant: str) -> None:
    """A prompt and two steps, with a cache that the compiled model fills."""
    ids = torch.arange(1, 13).view(2, 6)
    graphs = []
    for model in (fresh("llama", torch.float32), patch_model(fresh("llama", torch.float32), variant)):
        torch._dynamo.reset()
        backend, cache, copied = CompileCounterWithBackend("eager"), DynamicCache(), DynamicCache()
        whole = compiled(model.eval(), backend)
        for given in (ids, ids[:, :1], ids[:, 1:2]):
            with torch.no_grad():
                got = whole(given, **with_cache(model, cache)).logits
                assert distance(got, model(given, **with_cache(model, copied)).logits) <= 3e-5
        graphs.append(backend.frame_count)
    assert graphs[0] == graphs[1]
