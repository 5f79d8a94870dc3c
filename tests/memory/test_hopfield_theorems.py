"""Modern Hopfield attention's Theorem 5.2 and Lemmas D.1 to D.3: the residual of a network of attention alone.

Written from the paper, section 5 and appendix D; alpha = 0. A is the paper's norm |A|_{1,inf}. H holds scores that are
scaled already, so that the second term of the lemmas, C_2 / sqrt(d) with the unscaled scores of Theorem 5.2, is
|W_VO| |H| here.
The proof in the paper takes eq. 23 as Hoelder's inequality and eq. 42 without absolute values; both are false (below).
Lemma D.1 stands by another way. With M = (P - 1 s^T) R W, the residual of the layer is (I - J) M with J = 1 1^T / N.
|P_ij - s_j| is the integral over t of P_ij(t) |E_ij - sum_k P_ik(t) E_ik|, P(t) = softmax(t E + 1 r^T), and
P_ik(t) <= s_k e^{t w} for rows of E of width w. So |P - 1 s^T|_1 <= (1 + (e^w - 1) / w) |E|_1 <= 3 |E|_1 under the
paper's condition, which is e^w - 1 <= 2 w; and |P - 1 s^T|_inf <= w / 2 <= |E|_1. I - J doubles each norm at most:
6 and 2, whose geometric mean is below the 4 of the lemma.
Axes: S draw, H head, N token, E width, D width of a head.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hf_attn_swap.functional import hopfield_scores

from .harness import normal, tensor

CONDITION = 1.256  # where e^w - 1 = 2 w
DRAWS = 400


def one(matrix: Tensor) -> Tensor:
    """The operator norm |A|_1: the largest sum of a column (eq. 19)."""
    return matrix.abs().sum(-2).amax(-1)


def infinity(matrix: Tensor) -> Tensor:
    """The operator norm |A|_inf: the largest sum of a row (eq. 20)."""
    return matrix.abs().sum(-1).amax(-1)


def both(matrix: Tensor) -> Tensor:
    """The paper's |A|_{1,inf} (eq. 24)."""
    return (one(matrix) * infinity(matrix)).sqrt()


def residual(x: Tensor) -> Tensor:
    return x - x.mean(-2, keepdim=True)


@dataclass
class Layer:
    """A layer of heads without biases of the output: W_Q, W_K (S,H,E,D), b_Q (S,H,1,D) and W_VO (S,H,E,E)."""

    query: Tensor
    key: Tensor
    bias: Tensor
    value: Tensor

    @classmethod
    def drawn(cls, seed: int, heads: int, width: int, inner: int, size: float, draws: int = DRAWS) -> Layer:
        shape = (draws, heads, width, inner)
        query, key = normal(seed, *shape) * size, normal(seed + 1, *shape) * size
        return cls(query, key, normal(seed + 2, draws, heads, 1, inner), normal(seed + 3, draws, heads, width, width))

    def scores(self, x: Tensor) -> Tensor:
        """S (S,H,N,N), scaled."""
        wide = x.unsqueeze(-3)
        return (wide @ self.query + self.bias) @ (wide @ self.key).mT / self.query.shape[-1] ** 0.5

    def forward(self, x: Tensor, below: Tensor, alpha_prime: float) -> tuple[Tensor, Tensor]:
        """The layer's output (S,N,E) and H (S,H,N,N)."""
        hidden = hopfield_scores(self.scores(x), below, alpha_prime)
        return (hidden.softmax(-1) @ x.unsqueeze(-3) @ self.value).sum(-3), hidden

    def uneven(self, x: Tensor, below: Tensor, alpha_prime: float) -> Tensor:
        """E~ of eq. 40 (S,H,N,N): H without what is the same for all queries or for all keys."""
        rest = residual(x).unsqueeze(-3)
        own = rest @ self.query @ self.key.mT @ rest.mT / self.query.shape[-1] ** 0.5
        return (1 - alpha_prime) * own + alpha_prime * below

    def constants(self, below: Tensor) -> tuple[Tensor, Tensor]:
        """C_1 / sqrt(d) and C_2 / sqrt(d) of Lemma D.2, (S) each."""
        of_value = both(self.value)
        first = (of_value * one(self.query @ self.key.mT)).amax(-1) / self.query.shape[-1] ** 0.5
        return first, (of_value * one(below)).amax(-1)


def width_of(rows: Tensor) -> Tensor:
    """max_j,k |E_ij - E_ik|, d_i of eq. 43."""
    return rows.amax(-1) - rows.amin(-1)


def lemma(layer: Layer, x: Tensor, below: Tensor, alpha_prime: float, heads: int) -> tuple[Tensor, Tensor]:
    """The two terms of Lemma D.1 (one head) or D.2, (S) each."""
    (first, second), size = layer.constants(below), both(residual(x))
    return 4 * heads * (1 - alpha_prime) * first * size**3, 4 * heads * alpha_prime * second * size


def single(heads: int, tokens: int, seed: int) -> tuple[Layer, Tensor, Tensor]:
    """A layer, x and H of the layer below, of sizes over six decades, under the paper's condition."""
    x = normal(seed, DRAWS, tokens, 3) * 10 ** normal(seed + 1, DRAWS, 1, 1).clamp(-4, 0.3) + normal(seed + 2, 1, 1, 3)
    below = normal(seed + 3, DRAWS, heads, tokens, tokens)
    below *= torch.rand(DRAWS, 1, 1, 1, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return Layer.drawn(seed + 4, heads, 3, 4, 0.2), x, below


@pytest.mark.parametrize("alpha_prime", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("tokens", [2, 9])
def test_lemmas_d_1_and_d_2(heads: int, tokens: int, alpha_prime: float) -> None:
    """One layer shrinks the residual to r^3 times a constant and, by the scores of the layers below, r times another.

    Without the second term the bound is that of plain attention, and breaks wherever scores are carried.
    """
    layer, x, below = single(heads, tokens, 10)
    fits = width_of(layer.uneven(x, below, alpha_prime)).amax((-1, -2)) <= CONDITION
    assert fits.double().mean() > 0.15
    got = both(residual(layer.forward(x, below, alpha_prime)[0]))[fits]
    cubic, linear = (term[fits] for term in lemma(layer, x, below, alpha_prime, heads))
    assert (got <= cubic + linear).all()
    assert (got > cubic).any() == (alpha_prime > 0)


def test_lemma_d_2_needs_the_number_of_heads() -> None:
    """Sixteen heads that do the same give sixteen times the residual; the bound of one head breaks."""
    x, below = tensor((1.0,), (-1.0,)), torch.eye(2, dtype=torch.float64).expand(1, 16, 2, 2)
    zero, value = x.new_zeros(1, 16, 1, 4), x.new_ones(1, 16, 1, 1)
    layer = Layer(zero, zero, zero, value)
    got = both(residual(layer.forward(x[None], below, 0.5)[0]))
    assert sum(lemma(layer, x[None], below, 0.5, 1)) < got <= sum(lemma(layer, x[None], below, 0.5, 16))


def test_the_carried_part_is_scaled_once() -> None:
    """The recursive form of eq. 32 divides H of the layer below by sqrt(d) again. A bound of it does not hold."""
    x, below = tensor((1.0,), (-1.0,)), torch.eye(2, dtype=torch.float64)[None, None]
    layer = Layer(*(x.new_zeros(1, 1, 1, 400) for _ in range(3)), x.new_ones(1, 1, 1, 1))
    got = both(residual(layer.forward(x[None], below, 0.5)[0]))
    linear = lemma(layer, x[None], below, 0.5, 1)[1]
    assert linear / 400**0.5 < got <= linear


def test_the_condition_of_lemma_d_1() -> None:
    """|P_ij - s_j| <= 2 d_i s_j, where the lemma starts, while rows of E are no wider than 1.256; beyond, it breaks."""
    uneven = normal(1, DRAWS, 5, 5) * torch.linspace(0.1, 1.5, DRAWS, dtype=torch.float64)[:, None, None]
    own = 2 * normal(2, DRAWS, 1, 5)
    weights, shared = (uneven + own).softmax(-1), own.softmax(-1)
    width = width_of(uneven)[..., None]
    holds = ((weights - shared).abs() <= 2 * width * shared + 1e-15).all(-1)
    fits = width[..., 0] <= CONDITION
    assert 0.2 < fits.double().mean() < 0.8
    assert holds[fits].all()
    assert not holds[~fits].all()


def test_slips_of_the_proof() -> None:
    """Eq. 42 without absolute values, eq. 23, and the sum over heads after eq. 56 break; with them, eq. 45 holds."""
    layer, x, below = single(1, 5, 20)
    fits = width_of(layer.uneven(x, below, 0.5)).amax((-1, -2)) <= CONDITION
    weights, rest = layer.forward(x, below, 0.5)[1][:, 0].softmax(-1), residual(x)
    uneven = layer.uneven(x, below, 0.5)[:, 0]
    shared = (layer.forward(x, below, 0.5)[1][:, 0] - uneven).softmax(-1)[:, :1]
    width = width_of(uneven)[..., None]
    as_printed = weights @ rest <= (1 + 2 * width) * (shared @ rest)
    right = (weights @ rest - shared @ rest).abs() <= 2 * width * (shared @ rest.abs()) + 1e-15
    assert right[fits].all()
    assert not as_printed[fits].all()
    column, row = torch.ones(5, 1), torch.ones(1, 5)
    assert one(column @ row[:, :1]) > infinity(column) * one(row[:, :1])
    tall, wide = column @ torch.eye(5)[:1], torch.eye(5)[:, :1] @ row
    assert both(tall + wide) > both(tall) + both(wide), "no triangle inequality"


def by_paths(cubic: Tensor, linear: Tensor, size: Tensor, depth: int) -> Tensor:
    """The largest leaf of the tree in the proof of Theorem D.3: each layer takes one of the two terms of eq. 60."""
    leaves = []
    for path in itertools.product((True, False), repeat=depth):
        leaf = size
        for takes_cubic in path:
            leaf = cubic * leaf**3 if takes_cubic else linear * leaf
        leaves.append(leaf)
    return torch.stack(leaves).amax(0)


def theorem(cubic: Tensor, linear: Tensor, size: Tensor, depth: int, *, as_printed: bool = False) -> Tensor:
    """Theorem 5.2 (eq. 14): m layers take the cubic term. Those with the linear one come last, or first as printed."""
    terms = []
    for m in range(depth + 1):
        power = (3**m if as_printed else 1) * (depth - m)
        terms.append(cubic ** ((3**m - 1) // 2) * linear**power * size ** (3**m))
    return torch.stack(terms).amax(0)


def test_theorem_5_2_is_the_largest_leaf() -> None:
    """With r alpha' C_2 < 1, as the paper assumes, the power of it is L - m; 3^m (L - m) is right above 1 alone."""
    cubic, small, size = (
        torch.rand(3, DRAWS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).add(0.01).unbind()
    )
    leaf, printed = by_paths(cubic, small, size, 4), theorem(cubic, small, size, 4, as_printed=True)
    below_one = small < 1
    torch.testing.assert_close(leaf[below_one], theorem(cubic, small, size, 4)[below_one], rtol=1e-12, atol=0)
    assert (printed <= leaf * (1 + 1e-12))[below_one].all()
    assert (printed < 0.5 * leaf)[below_one].any()
    large = 1 + small
    torch.testing.assert_close(
        by_paths(cubic, large, size, 4), theorem(cubic, large, size, 4, as_printed=True), rtol=1e-12, atol=0
    )
    assert (theorem(cubic, large, size, 4) < 0.5 * by_paths(cubic, large, size, 4)).any()


@pytest.mark.parametrize("alpha_prime", [0.0, 0.5, 0.9])
def test_theorems_5_1_and_5_2(alpha_prime: float) -> None:
    """Layers of attention alone, one on the other: carried scores end the double exponential decay.

    Theorem 5.2 holds for every alpha'. Theorem 5.1 holds where no scores are carried, and breaks where they are.
    """
    x, below = 0.3 * normal(1, DRAWS, 2, 1), torch.zeros(DRAWS, 1, 2, 2, dtype=torch.float64)
    start, constants, widths, rounding = both(residual(x)), [], [], 1e-15
    for depth in range(1, 5):
        layer = Layer.drawn(10 * depth, 1, 1, 1, 1.0)
        constants.append(torch.stack(layer.constants(below)))
        widths.append(width_of(layer.uneven(x, below, alpha_prime)).amax((-1, -2)))
        x, below = layer.forward(x, below, alpha_prime)
        fits = torch.stack(widths).amax(0) <= CONDITION
        assert fits.double().mean() > 0.9
        first, second = 8 * torch.stack(constants).amax(0)[:, fits]
        got = both(residual(x))[fits]
        bound = theorem((1 - alpha_prime) * first, alpha_prime * second, start[fits], depth)
        assert (got <= bound + rounding).all()
    plain = first ** ((3**depth - 1) // 2) * start[fits] ** (3**depth)
    assert (got > plain + rounding).any() == (alpha_prime > 0)


@pytest.mark.parametrize(("sign", "stays"), [(-1, True), (1, False)])
def test_the_sign_of_eq_77_and_78(sign: int, stays: bool) -> None:
    """Central differences, h_{n+1} = 2 rho S +- 2 rho h_n + h_{n-1}: h = S rests with the minus that they give.

    The paper prints a plus. With either sign a disturbance grows by rho + sqrt(1 + rho^2) per layer.
    """
    rho, scores = 0.5, normal(1, 6)
    assert (2 * rho * scores + sign * 2 * rho * scores + scores).allclose(scores) == stays
    sizes, before, now = [], tensor(0.0)[0], tensor(1.0)[0]
    for _ in range(40):
        before, now = now, sign * 2 * rho * now + before
        sizes.append(now.abs())
    torch.testing.assert_close(sizes[-1] / sizes[-2], tensor(rho + (1 + rho**2) ** 0.5)[0])
