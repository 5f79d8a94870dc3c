"""SimpleTRON, belief and Hopfield on plain tensors: equal to their definitions at every shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_attn_swap import functional as F
from tests import slow

from .harness import TOLERANCE

TIGHT = TOLERANCE[torch.float64]
few = settings(max_examples=40, deadline=None, derandomize=True)


def close(got: Tensor, wanted: Tensor, tolerance: float = TIGHT) -> None:
    assert got.shape == wanted.shape
    assert torch.isfinite(got).all()
    error = (got - wanted).abs().max() / wanted.abs().max().clamp_min(1)
    assert float(error.detach()) <= tolerance


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def slopes(out: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    weights = normal(7, *out.shape)
    return torch.autograd.grad((out * weights).sum(), leaves)


@st.composite
def attention(draw: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """q (B,H,Q,D), k and v (B,H,K,D) with Q <= K, and a key mask that may forbid whole rows."""
    batch, heads, queries, width = (draw(st.integers(1, top)) for top in (3, 3, 7, 5))
    keys = queries + draw(st.integers(0, 4))
    seed = draw(st.integers(0, 10_000))
    q, k, v = normal(seed, batch, heads, queries, width), *normal(seed + 1, 2, batch, heads, keys, width)
    kind = draw(st.sampled_from(("none", "some", "nothing")))
    mask = normal(seed + 2, batch, keys) < 0.5 if kind != "none" else None
    if kind == "nothing":
        mask[0] = False
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), mask


@pytest.mark.parametrize("chunk", [F.CHUNK, 3])
@few
@given(drawn=attention(), causal=st.booleans(), length=st.sampled_from(("true", "fixed")))
def test_simple_attention(chunk: int, drawn: Any, causal: bool, length: str) -> None:
    q, k, v, mask = drawn
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(F.linear, "CHUNK", chunk)
        got = F.simple_attention(q, k, v, causal=causal, key_mask=mask, length=length)
    wanted = slow.slow_simple_attention(q, k, v, causal=causal, key_mask=mask, length=length)
    close(got, wanted)
    for one, other in zip(slopes(got, q, k, v), slopes(wanted + 0 * q + 0 * (k.sum() + v.sum()), q, k, v), strict=True):
        close(one, other)


class Elsewhere(Tensor):
    """A tensor that says that it is not on the CPU: what is chosen by device takes its other way."""

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


@pytest.mark.parametrize("kind", [Tensor, Elsewhere])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("past", [0, 5])
def test_simple_attention_across_blocks(length: int, past: int, kind: type[Tensor]) -> None:
    """Queries on both sides of a block's edge, against the whole product at once; on the CPU's way and the other."""
    shapes = ((2, 2, length, 4), (2, 2, past + length, 4), (2, 2, past + length, 3))
    q, k, v = (normal(seed, *shape).requires_grad_() for seed, shape in enumerate(shapes, 1))
    mask = normal(4, 2, past + length) < 1
    order = torch.ones(length, past + length).tril(past).bool()
    seen = order & mask[:, None, None, :]
    count = seen.sum(-1, keepdim=True).clamp_min(1)
    wanted = ((q @ k.transpose(2, 3)).masked_fill(~seen, 0) @ v) / count.double().sqrt()
    given = (tensor.as_subclass(kind) for tensor in (q, k, v))
    got = F.simple_attention(*given, causal=True, key_mask=mask).as_subclass(Tensor)
    close(got, wanted, 1e-11)
    for one, other in zip(slopes(got, q, k, v), slopes(wanted, q, k, v), strict=True):
        close(one, other, 1e-11)


@few
@given(st.tuples(*(st.integers(1, top) for top in (3, 5, 4, 6))), st.integers(0, 10_000), st.booleans(), st.booleans())
def test_belief_projection(shape: tuple[int, ...], seed: int, per_head: bool, empty: bool) -> None:
    y, v = normal(seed, *shape).requires_grad_(), normal(seed + 1, *shape)
    if empty:
        v[:, 0] = 0  # nothing to take away
    v.requires_grad_()
    got = F.belief_projection(y, v, per_head=per_head)
    wanted = slow.slow_belief_projection(y, v, per_head=per_head)
    # dividing by a tiny <v, v> magnifies rounding: one head of width 1 is the worst
    close(got, wanted, TIGHT * 10)
    for one, other in zip(slopes(got, y, v), slopes(wanted, y, v), strict=True):
        close(one, other, 1e-10)
    if empty:
        assert torch.equal(got[:, 0], y[:, 0])
    axes = (-1,) if per_head else (-2, -1)
    left = (got * v).sum(axes).abs().max().detach()
    assert float(left) <= 1e-12 * float((y * v).sum(axes).abs().max().detach() + 1)


@pytest.mark.parametrize("per_head", [False, True])
def test_the_floor_of_the_belief_projection(per_head: bool) -> None:
    """<v, v> = 1e-7 is above the floor of 1e-8, and taken away whole; below the floor, <y, v> is divided by 1e-8."""
    y = torch.tensor([3.0, 4.0], dtype=torch.float64).view(1, 1, 1, 2)
    for square, left in ((1e-7, 0.0), (1.01e-8, 0.0), (1e-9, 0.9 * 3), (1e-12, (1 - 1e-4) * 3)):
        v = torch.tensor([square**0.5, 0.0], dtype=torch.float64).view(1, 1, 1, 2)
        got = F.belief_projection(y, v, per_head=per_head)
        assert got.flatten().tolist() == pytest.approx([left, 4.0], abs=1e-12)
    got = F.belief_projection(y, v, per_head=per_head, eps=1e-12)
    assert got.flatten().tolist() == pytest.approx([0.0, 4.0], abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("per_head", [False, True])
def test_belief_projection_in_half_precision(dtype: torch.dtype, per_head: bool) -> None:
    """Norms above 256 overflow fp16 when squared: accumulate in fp32."""
    y, v = (normal(seed, 1, 4, 2, 8).mul(400).to(dtype) for seed in (1, 2))
    got = F.belief_projection(y, v, per_head=per_head)
    assert got.dtype == dtype
    close(got.double(), F.belief_projection(y.double(), v.double(), per_head=per_head), 1e-2)


@few
@given(st.integers(1, 6), st.sampled_from((0.0, 0.3, 0.5, 1.0)), st.integers(0, 10_000))
def test_hopfield_scores(layers: int, share: float, seed: int) -> None:
    """The recursion is its own sum: every layer's scores with the weight that is left of them."""
    scores = list(normal(seed, layers, 1, 2, 3, 4))
    hidden = torch.zeros_like(scores[0])
    for layer_scores in scores:
        hidden = F.hopfield_scores(layer_scores, hidden, share)
    close(hidden, slow.slow_hopfield_scores(scores, share))
    close(
        F.hopfield_scores(scores[0], hidden, torch.tensor([share], dtype=torch.float64)),
        F.hopfield_scores(scores[0], hidden, share),
    )


@few
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from((0.0, 0.3, 1.0)), st.integers(1, 4), st.integers(0, 9999))
def test_hopfield_retrieve(count: int, width: int, n: float, steps: int, seed: int) -> None:
    patterns, states = normal(seed, count, width), normal(seed + 1, 3, width)
    got = F.hopfield_retrieve(states, patterns, 0.7, n=n, steps=steps)
    wanted = torch.stack([slow.slow_hopfield_retrieve(state, patterns, 0.7, n, steps) for state in states])
    close(got, wanted)
    own = F.hopfield_retrieve(states, patterns.expand(3, -1, -1), 0.7, n=n, steps=steps)
    close(own, wanted)


@pytest.mark.parametrize("length", ["true", "fixed"])
@pytest.mark.parametrize("split", [1, 3, 6])
def test_what_came_before_is_a_state_and_two_counts(split: int, length: str) -> None:
    """The tokens behind a cut, given the state before the cut, are those of the whole sequence; real keys are fewer."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 8, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[0, :2] = False
    whole = F.simple_attention(q, k, v, causal=True, key_mask=mask, length=length)[:, :, split:]
    before = k[:, :, :split].masked_fill(~mask[:, None, :split, None], 0)
    state = before.transpose(2, 3) @ v[:, :, :split]
    past = (state, mask[:, :split].sum(-1), torch.tensor([split]))
    behind = (tensor[:, :, split:] for tensor in (q, k, v))
    got = F.simple_attention(*behind, causal=True, key_mask=mask[:, split:], length=length, past=past)
    close(got, whole, 1e-12)


def test_defaults_are_the_papers() -> None:
    """softmax_1 in retrieval, the 10th power for the polynomial."""
    generator = torch.Generator().manual_seed(0)
    patterns, state = torch.randn(5, 4, generator=generator).double(), torch.randn(4, generator=generator).double()
    close(F.hopfield_retrieve(state, patterns, 1.5), F.hopfield_retrieve(state, patterns, 1.5, n=1.0), 0)
    assert not torch.equal(F.hopfield_retrieve(state, patterns, 1.5), F.hopfield_retrieve(state, patterns, 1.5, n=2.0))
    scores = patterns @ state
    close(F.polynomial(scores), scores**10 / (scores**10).sum(), 1e-12)
