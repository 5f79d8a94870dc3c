"""The normalizers on plain tensors: equal to their definitions, stable, and differentiable everywhere."""

from __future__ import annotations

import math
from typing import Any

import entmax
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_attn_swap import functional as F
from tests import slow

from .harness import TOLERANCE

TIGHT = TOLERANCE[torch.float64]
NS = (0.0, 0.3, 1.0, 5.0)
few = settings(max_examples=40, deadline=None, derandomize=True)
LOWEST = torch.finfo(torch.float64).min
SPARSE = [
    (F.sparsemax, slow.slow_sparsemax, entmax.sparsemax),
    (F.entmax15, slow.slow_entmax15, entmax.entmax15),
]
SPARSE_IDS = ["sparsemax", "entmax15"]


@st.composite
def rows(draw: Any, masked: bool = True) -> tuple[Tensor, Tensor]:
    """Scores (R,K) of any size and offset, and which may be seen; some rows may see nothing."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))
    scale = draw(st.sampled_from((0.0, 0.1, 1.0, 30.0)))
    offset = draw(st.sampled_from((0.0, -1e4, 1e4)))
    scores = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + offset
    if draw(st.booleans()):
        scores = scores.round()  # ties
    seen = torch.ones(shape, dtype=torch.bool)
    if masked and draw(st.booleans()):
        seen = torch.rand(shape, generator=generator) < 0.6
    if masked and draw(st.booleans()):
        seen[0] = False
    return scores, seen


def with_gradient(function: Any, scores: Tensor, allowed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    leaf = scores.clone().requires_grad_()
    out = function(leaf) if allowed is None else function(leaf, allowed)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    (gradient,) = torch.autograd.grad((out * weights).sum(), leaf)
    return out.detach(), gradient


def close(got: Tensor, wanted: Tensor, tolerance: float = TIGHT) -> None:
    assert torch.isfinite(got).all()
    assert float((got - wanted).abs().max()) <= tolerance


@few
@given(rows(), st.sampled_from(NS), st.booleans())
def test_softmax_n(drawn: tuple[Tensor, Tensor], n: float, infinite: bool) -> None:
    """Values and gradients, masked by -inf or by the lowest number; n as a number and as a tensor."""
    scores, seen = drawn
    if n == 0:
        seen = seen | ~seen.any(-1, keepdim=True)  # a fully masked row of ordinary softmax is the caller's
    masked = scores.masked_fill(~seen, -math.inf if infinite else LOWEST)
    wanted, slope = with_gradient(lambda s, a: slow.slow_softmax_n(s, n, a), scores, seen)
    for given_n in (n, torch.tensor([n], dtype=torch.float64)):
        got, gradient = with_gradient(lambda s, given_n=given_n: F.softmax_n(s, given_n), masked)
        close(got, wanted)
        close(gradient.masked_fill(~seen, 0), slope, TIGHT * 3)
        assert torch.isfinite(gradient).all(), "a fully masked row has a gradient of 0, not NaN"
        assert not got[~seen.any(-1)].any()


@few
@given(rows(masked=False), st.sampled_from(NS))
def test_softmax_n_is_softmax_with_n_more_keys(drawn: tuple[Tensor, Tensor], n: float) -> None:
    scores, _ = drawn
    more = torch.cat([scores, torch.full_like(scores[:, :1], math.log(n) if n else -math.inf)], -1)
    close(F.softmax_n(scores, n), more.softmax(-1)[:, :-1])
    close(F.softmax_n(scores.T, n, dim=0).T, F.softmax_n(scores, n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_softmax_n_far_below_zero(dtype: torch.dtype) -> None:
    """Subtracting the row's maximum alone divides 0 by 0 there; adding 1 after the shift is off by order 1."""
    scores = torch.full((1, 4), -60000.0, dtype=dtype, requires_grad=True)
    weights = F.softmax_n(scores)
    weights.sum().backward()
    assert not weights.any()
    assert torch.isfinite(scores.grad).all()
    half = F.softmax_n(torch.full((1, 1), -2.0), 1.0)
    assert float(half) == pytest.approx(math.exp(-2) / (1 + math.exp(-2)), abs=1e-7)


@few
@given(rows(), st.sampled_from((0.0, -0.025, -0.4)), st.sampled_from((1.0, 1.1, 2.0)), st.sampled_from((0.0, 1.0)))
def test_clipped_softmax(drawn: tuple[Tensor, Tensor], gamma: float, zeta: float, n: float) -> None:
    scores, seen = drawn
    seen = seen | ~seen.any(-1, keepdim=True)
    masked = scores.masked_fill(~seen, LOWEST)
    wanted, slope = with_gradient(lambda s, a: slow.slow_clipped_softmax(s, gamma, zeta, n, a), scores, seen)
    got, gradient = with_gradient(lambda s: F.clipped_softmax(s, gamma, zeta, n=n).masked_fill(~seen, 0), masked)
    close(got, wanted)
    close(gradient.masked_fill(~seen, 0), slope, TIGHT * 3)


def test_no_clip_is_softmax_bit_for_bit() -> None:
    """Also where weights are exactly 0 and 1: the derivative of the clip is 1 there."""
    scores = torch.tensor([[0.0, -2000.0, -3000.0], [1.0, 2.0, 3.0]], dtype=torch.float64)
    stock, slope = with_gradient(lambda s: torch.softmax(s, -1), scores)
    got, gradient = with_gradient(lambda s: F.clipped_softmax(s, 0.0, 1.0), scores)
    assert set(stock[0].tolist()) == {0.0, 1.0}
    assert torch.equal(got, stock)
    assert torch.equal(gradient, slope)
    edge = torch.tensor([0.0, 1.0], requires_grad=True)
    F.clip(edge, 0.0, 1.0).sum().backward()
    assert edge.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(("ours", "literal", "oracle"), SPARSE, ids=SPARSE_IDS)
@few
@given(drawn=rows())
def test_sparse_normalizers(ours: Any, literal: Any, oracle: Any, drawn: tuple[Tensor, Tensor]) -> None:
    """Against the definition (masked rows too) and against the `entmax` package (which fails on those)."""
    scores, seen = drawn
    some = seen | ~seen.any(-1, keepdim=True)
    masked = scores.masked_fill(~some, LOWEST)
    got, gradient = with_gradient(ours, masked)
    close(got, literal(scores, some), 1e-11)
    close(got.sum(-1), torch.ones(len(got), dtype=torch.float64), 1e-11)
    close(got, oracle(masked, -1), 1e-11)
    _, slope = with_gradient(lambda s: oracle(s, -1), masked)
    assert torch.isfinite(gradient).all()
    kink = (got > 0) != (got > 1e-9)
    if not kink.any() and not ties(got, scores):
        close(gradient, slope, 1e-8)


def ties(weights: Tensor, scores: Tensor) -> bool:
    """Whether some score lies on the threshold, where the derivative has two values."""
    zero = scores.masked_fill(weights > 0, -math.inf).amax(-1)
    least = scores.masked_fill(weights <= 0, math.inf).amin(-1)
    edge = weights.masked_fill(weights <= 0, math.inf).amin(-1)
    return bool(((least - zero < 1e-6) | (edge < 1e-6)).any())


@pytest.mark.parametrize(("ours", "literal", "oracle"), SPARSE, ids=SPARSE_IDS)
def test_sparse_normalizers_on_hard_rows(ours: Any, literal: Any, oracle: Any) -> None:
    """A row that may see nothing, equal scores, one key, and scores beyond any scale."""
    for row in ([LOWEST] * 4, [0.0] * 5, [3.0], [-1e30, -1e30, 5.0], [1e5, 1e5 - 0.5, -1e5], [LOWEST, 2.0, 1.9]):
        for dtype in (torch.float64, torch.float32):
            lowest = torch.finfo(dtype).min
            scores = torch.tensor([[max(value, lowest) for value in row]], dtype=dtype)
            got, gradient = with_gradient(ours, scores)
            assert torch.isfinite(got).all()
            assert torch.isfinite(gradient).all()
            assert float(got.sum()) == pytest.approx(1, abs=1e-5)
            if len(set(row)) == 1:
                assert torch.allclose(got, torch.full_like(got, 1 / len(row)))
    assert (ours(torch.tensor([[5.0, 0.0, 0.0]])) == torch.tensor([[1.0, 0.0, 0.0]])).all()


@pytest.mark.parametrize(("ours", "literal", "oracle"), SPARSE, ids=SPARSE_IDS)
def test_sparse_normalizers_gradcheck_and_axis(ours: Any, literal: Any, oracle: Any) -> None:
    scores = torch.tensor([[0.3, 0.1, -0.2, -3.0], [1.0, 0.9, 0.2, 0.35]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(ours, scores)
    close(ours(scores.detach().T, 0).T, ours(scores.detach()))


@pytest.mark.parametrize(("ours", "literal", "oracle"), SPARSE, ids=SPARSE_IDS)
def test_sparse_normalizers_in_single_precision(ours: Any, literal: Any, oracle: Any) -> None:
    scores = torch.randn(50, 33, generator=torch.Generator().manual_seed(2)) * 3
    close(ours(scores), literal(scores.double()).float(), TOLERANCE[torch.float32])


@few
@given(rows(), st.sampled_from((1.05, 1.3, 1.5, 1.77, 1.99)))
def test_entmax(drawn: tuple[Tensor, Tensor], alpha: float) -> None:
    """Against the definition by halving, and against the `entmax` package, with both gradients."""
    scores, seen = drawn
    some = seen | ~seen.any(-1, keepdim=True)
    masked = scores.masked_fill(~some, LOWEST)
    alphas = torch.full((len(scores), 1), alpha, dtype=torch.float64)
    got, gradient = with_gradient(lambda s: F.entmax(s, alphas), masked)
    close(got, slow.slow_entmax(scores, alpha, some), 1e-11)
    close(got.sum(-1), torch.ones(len(got), dtype=torch.float64))
    oracle = lambda s, a: entmax.entmax_bisect(s, a, n_iter=100)  # noqa: E731  # two gradients are taken of it
    close(got, oracle(masked, alphas), 1e-11)
    _, slope = with_gradient(lambda s: oracle(s, alphas), masked)
    _, of_alpha = with_gradient(lambda a: F.entmax(masked, a), alphas)
    _, wanted = with_gradient(lambda a: oracle(masked, a), alphas)
    if not ties(got, scores):
        close(gradient, slope, 1e-8)
        close(of_alpha, wanted, 1e-8)


def test_entmax_ends_in_softmax_and_sparsemax() -> None:
    """Values and gradients, from alpha = 1 and from just above; the gradient in alpha by differences of one side."""
    scores = torch.randn(6, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2
    for alpha, other in ((1.0, lambda s: torch.softmax(s, -1)), (2.0, F.sparsemax), (1.5, F.entmax15)):
        for got, wanted in zip(
            with_gradient(lambda s, a=alpha: F.entmax(s, a), scores), with_gradient(other, scores), strict=True
        ):
            close(got, wanted)
    near, _ = with_gradient(lambda s: F.entmax(s, 1 + 1e-9), scores)
    close(near, scores.softmax(-1), 1e-7)
    step = 1e-6
    for alpha, side in ((1.0, step), (1.0 + 1e-7, step), (2.0, -step)):
        at = torch.full((6, 1), alpha, dtype=torch.float64)
        _, slope = with_gradient(lambda a: F.entmax(scores, a), at)
        weights = torch.linspace(-1, 2, 54, dtype=torch.float64).view(6, 9)
        moved = (F.entmax(scores, alpha + side) - F.entmax(scores, alpha)) * weights / side
        close(slope[:, 0], moved.sum(-1), 1e-4)


@pytest.mark.parametrize("alpha", [1.1, 1.5, 1.9])
def test_entmax_gradcheck_and_axis(alpha: float) -> None:
    """Two derivatives, in the scores and in an alpha per head; alpha as a number, and another axis."""
    scores = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    alphas = torch.tensor([alpha, 1.4, 1.6], dtype=torch.float64).view(3, 1).requires_grad_()
    assert torch.autograd.gradcheck(F.entmax, (scores, alphas))
    assert torch.autograd.gradgradcheck(F.entmax, (scores, alphas))
    with torch.no_grad():
        close(F.entmax(scores, alphas)[:, 0], F.entmax(scores[:, 0], alpha))
        close(F.entmax(scores.transpose(1, 2), alpha, 1), F.entmax(scores, alpha).transpose(1, 2))


def test_entmax_on_hard_rows() -> None:
    """Equal scores, one key, scores beyond any scale, -inf at what is hidden, and single precision."""
    for row in ([0.0] * 5, [3.0], [-1e30, -1e30, 5.0], [1e5, 1e5 - 0.5, -1e5], [-math.inf, 2.0, 1.9]):
        for dtype in (torch.float64, torch.float32):
            for alpha in (1.0, 1.001, 1.5, 2.0):
                scores, at = torch.tensor([row], dtype=dtype), torch.tensor([[alpha]], dtype=dtype)
                got, gradient = with_gradient(lambda s, a=at: F.entmax(s, a), scores)
                _, slope = with_gradient(lambda a, s=scores: F.entmax(s, a), at)
                assert float(got.sum()) == pytest.approx(1, abs=1e-6)
                assert torch.isfinite(gradient).all()
                assert torch.isfinite(slope).all()
                if len(set(row)) == 1:
                    assert torch.allclose(got, torch.full_like(got, 1 / len(row)))
    scores = torch.randn(50, 33, generator=torch.Generator().manual_seed(2)) * 3
    close(F.entmax(scores, 1.7), slow.slow_entmax(scores.double(), 1.7).float(), TOLERANCE[torch.float32])
    with pytest.raises(ValueError, match=r"alpha between 1 .* and 2 .*, got 2\.5"):
        F.entmax(scores, 2.5)
