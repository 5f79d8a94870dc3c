"""A `score_mod` in blocks equals its readable form, gradients too, and the readable form is FlexAttention's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from hf_attn_swap import patch_model
from hf_attn_swap.core.call import Call, Geometry, Inputs
from hf_attn_swap.core.masks import Masks
from hf_attn_swap.kernels import blocks
from hf_attn_swap.kernels.dispatch import Form, Setting
from hf_attn_swap.layer import compute
from hf_attn_swap.layer.compute import Places
from hf_attn_swap.variants.base import VARIANTS, Variant, register
from tests.harness.generation import assert_equal_generation, prompt_of
from tests.kernels.drawn import EXACT, drawn, gradients
from tests.kernels.in_blocks import MASKS, mask_of
from tests.kernels.largest import Largest

from .harness import assert_identical, assert_same, batch_of, distance, forward, fresh, perturb, refused, run_all

Formula = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
BATCH, GROUPS, HEADS, QUERIES, KEYS, WIDTH = 2, 2, 4, 5, 7, 3


def _cap(slopes: Tensor, score: Tensor, *_: Tensor) -> Tensor:
    return torch.tanh(score)


def _distance(slopes: Tensor, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score - slopes[head] * (q_idx - kv_idx).abs()


def _near(slopes: Tensor, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where((q_idx - kv_idx).abs() < 2, score, -torch.inf)


def _by_batch(slopes: Tensor, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return score * (1 + batch) + torch.where(kv_idx == 0, slopes[head] * head, 0.0)


def _blind(slopes: Tensor, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.where(q_idx == 3, -torch.inf, score)


FORMULAS: dict[str, Formula] = {
    "cap": _cap,
    "distance": _distance,
    "near": _near,
    "by_batch": _by_batch,
    "blind": _blind,
}


class Tried(Variant):
    """The formula of a subclass, with a number that each head learns."""

    places = ("scores",)
    formula: Formula

    def __init__(self, options: Any, geometry: Geometry) -> None:
        super().__init__(options, geometry)
        self.slopes = nn.Parameter(torch.empty(geometry.heads))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        self.slopes.copy_(torch.rand(self.slopes.shape, generator=generator))

    def score_mod(self, score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return type(self).formula(self.slopes, score, batch, head, q_idx, kv_idx)


def variant(name: str) -> type[Variant]:
    return type("Tried", (Tried,), {"formula": staticmethod(FORMULAS[name]), "name": name})


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks in each direction."""
    monkeypatch.setitem(blocks.SCORES, "cpu", 12)
    monkeypatch.setattr(blocks, "ROWS", 2)


@pytest.fixture
def registered(registry_as_before: None) -> None:
    for name in FORMULAS:
        register(name)(variant(name))


def one_layer(name: str, kind: str, causal: bool, strength: float) -> tuple[Places, Inputs, Call, list[Tensor]]:
    """The arguments of `compute`, and the tensors that get gradients."""
    query, key, value, slopes = drawn(3, (BATCH, HEADS, QUERIES, WIDTH), *[(BATCH, GROUPS, KEYS, WIDTH)] * 2, (HEADS,))
    made = variant(name)(None, Geometry(heads=HEADS, kv_heads=GROUPS, head_dim=WIDTH, hidden=HEADS * WIDTH))
    made.slopes = nn.Parameter(slopes.detach())
    mask = mask_of("padding" if causal else kind, BATCH, HEADS, QUERIES, KEYS, 1)
    masks = Masks(queries=QUERIES, keys=KEYS, device=query.device, causal=causal)
    if mask is not None and mask.shape[2] == 1 < QUERIES:
        masks.key_mask = mask[:, 0, 0]
    else:
        masks.given = mask
    inputs = Inputs(query, key, value, 1.3, masks, 0.0)
    exact: Any = 1.0 if strength == 1 else torch.tensor([strength], dtype=torch.float64)
    call = Call(x=query, start=KEYS - QUERIES, exact_strength=exact)
    return Places(by_place=made), inputs, call, [query, key, value, made.slopes]


def cells() -> Iterator[Any]:
    strengths = itertools.cycle((1.0, 0.5))
    for (name, kind), strength in zip(itertools.product(FORMULAS, MASKS[:-1]), strengths, strict=False):
        yield name, kind, False, strength
    for name, strength in itertools.product(FORMULAS, (1.0, 0.5)):
        yield name, "padding", True, strength
    yield "near", "blind", False, 1.0


@pytest.mark.usefixtures("small_blocks")
def test_blocks_equal_the_readable_form() -> None:
    for cell in cells():
        places, inputs, call, learned = one_layer(*cell)
        form = places.form(Setting.of(inputs, call))
        assert form is Form.WEIGHTED
        got = compute._attended(places, inputs, call, None, False, form)[0]  # type: ignore[arg-type]  # no SDPA
        wanted = compute.reference(places, inputs, call)[0]
        torch.testing.assert_close(got, wanted, rtol=EXACT, atol=EXACT, msg=str(cell))
        both = [torch.autograd.grad(heads.sin().sum(), learned, materialize_grads=True) for heads in (got, wanted)]
        torch.testing.assert_close(*both, rtol=EXACT, atol=EXACT, msg=str(cell))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", FORMULAS)
def test_the_readable_form_is_that_of_flex_attention(name: str) -> None:
    """FlexAttention counts queries from 0; here they are the last ones of their text."""
    places, inputs, call, _ = one_layer(name, "none", False, 1.0)
    assert places.by_place is not None
    score_mod = places.by_place.score_mod
    behind = KEYS - QUERIES

    def shifted(score: Tensor, batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score_mod(score, batch, head, q_idx + behind, kv_idx)

    with torch.no_grad():
        heads = compute.reference(places, inputs, call)[0]
        qkv = (tensor.detach() for tensor in inputs.three)
        wanted = flex_attention(*qkv, score_mod=shifted, scale=inputs.scaling, enable_gqa=True)
    torch.testing.assert_close(heads.transpose(1, 2), wanted, rtol=EXACT, atol=EXACT)


@pytest.mark.usefixtures("small_blocks", "registered")
@pytest.mark.parametrize(("name", "family", "padded"), [("distance", "llama", "left"), ("near", "bert", "right")])
def test_models(name: str, family: str, padded: str) -> None:
    batch = batch_of(family, padded=padded)
    stock = run_all(fresh(family), batch)
    for strength in (0.0, 0.5, 1.0):
        model = patch_model(fresh(family), name, strength=strength)
        fast = run_all(model, batch)
        if not strength:
            own = {key: gradient for key, gradient in fast[1].items() if "attn_swap" not in key}
            assert_identical((fast[0], own), stock)
            continue
        assert_same(fast, run_all(model, batch, output_attentions=True))
        assert distance(fast[0], stock[0]) > 1e-4
        assert any(gradient.any() for key, gradient in fast[1].items() if "slopes" in key) is (name == "distance")


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["window+distance", "sink+by_batch", "near+entmax15", "distance+outeffhop"])
def test_compositions(name: str) -> None:
    options: Any = {"window": {"window": 3, "sinks": 1}} if "window" in name else {}
    model, batch = perturb(patch_model(fresh("llama"), name, **options)), batch_of("llama", padded="left")
    assert_same(run_all(model, batch), run_all(model, batch, output_attentions=True))


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("name", ["distance", "by_batch"])
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}])
def test_generation_with_a_cache(name: str, how: dict[str, Any]) -> None:
    assert_equal_generation(perturb(patch_model(fresh("llama"), name)), prompt_of("llama", "left"), how)


def test_no_tensor_of_queries_and_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory grows with the length and not with its square: twice the length, twice the largest tensor at most."""
    monkeypatch.setitem(blocks.SCORES, "cpu", 1)
    monkeypatch.setattr(blocks, "ROWS", 8)
    made = variant("distance")(None, Geometry(heads=2, kv_heads=2, head_dim=4, hidden=8))
    largest = []
    for length in (64, 128):
        query, key, value = drawn(0, *[(1, 2, length, 4)] * 3, dtype=torch.float32)
        masks = Masks(queries=length, keys=length, device=query.device, causal=True)
        inputs = Inputs(query, key, value, 1.0, masks, 0.0)
        with Largest() as seen:
            heads = compute._attended(Places(by_place=made), inputs, Call(x=query), None, False, Form.WEIGHTED)[0]  # type: ignore[arg-type]  # no SDPA
            gradients(heads, [query, key, value, made.slopes], 4)
        largest.append(seen.size)
        assert seen.size < length * length / 4
    assert largest[1] <= 2 * largest[0]


@pytest.mark.usefixtures("registered")
def test_what_cannot_be_computed_is_refused() -> None:
    places, inputs, call, learned = one_layer("distance", "none", False, 1.0)
    heads = compute._attended(places, inputs, call, None, False, Form.WEIGHTED)[0]  # type: ignore[arg-type]  # no SDPA
    with refused("no second derivative"):
        torch.autograd.grad(heads.sum(), learned, create_graph=True)
    for name, *reasons in (
        ("modern_hopfield+near", "both change the scores"),
        ("near+simpletron", "'simpletron' composes with nothing"),
        ("cap+near", "both change the scores"),
    ):
        with refused(*reasons):
            patch_model(fresh("llama"), name)
    hopfield = VARIANTS["modern_hopfield"]
    for cls, reason in (
        (type("Both", (hopfield,), {"score_mod": Tried.score_mod}), "no method carry"),
        (
            type("Nowhere", (Variant,), {"score_mod": Tried.score_mod}),
            "add 'scores' to places",
        ),
        (type("Linear", (VARIANTS["simpletron"],), {"score_mod": Tried.score_mod}), "score_mod would never run"),
    ):
        with refused("score_mod", reason):
            register("tried_out")(cls)


@pytest.mark.usefixtures("registered")
def test_a_compiler_reads_the_formula() -> None:
    model, batch = patch_model(fresh("llama", num_hidden_layers=1), "distance"), batch_of("llama")
    wanted = forward(model, batch)
    torch._dynamo.reset()
    got = forward(torch.compile(model, backend="eager", fullgraph=True), batch)
    torch._dynamo.reset()
    assert distance(got, wanted) <= EXACT
