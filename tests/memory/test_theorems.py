"""OutEffHop's theorems on the package's retrieval, with the paper's conditions and without them.

The text at hand has the statements of the paper without their formulas. Each bound here follows the steps of its
proof, from the definitions. T is one update with softmax (n = 0), T_1 one with softmax_1. With the weights p of
softmax, g = Z / (1 + Z), Z = sum_j exp(beta <y_j, x>), and e = 1 - p_i for the pattern y_i that is asked for,
T_1(x) = g T(x).
Axes: S draw, N pattern, D width.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_attn_swap.functional import hopfield_energy, hopfield_retrieve, softmax_n

from .harness import close, normal

DRAWS = 500


def on_a_sphere(seed: int, *shape: int) -> Tensor:
    return torch.nn.functional.normalize(normal(seed, *shape), dim=-1)


def near(patterns_SND: Tensor, radius: float, seed: int) -> Tensor:
    """States (S,D) at this distance from the first pattern of each draw."""
    return patterns_SND[:, 0] + radius * on_a_sphere(seed, len(patterns_SND), patterns_SND.shape[2])


def errors(patterns_SND: Tensor, state_SD: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """The distances (S) of T_1(x) and of T(x) from the first pattern."""
    both = (hopfield_retrieve(state_SD, patterns_SND, beta, n=n) for n in (1.0, 0.0))
    one, dense = ((read - patterns_SND[:, 0]).norm(dim=-1) for read in both)
    return one, dense


def numbers(patterns_SND: Tensor, state_SD: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """g and e, (S) each."""
    scores = beta * torch.einsum("snd,sd->sn", patterns_SND, state_SD)
    return torch.sigmoid(scores.logsumexp(-1)), 1 - scores.softmax(-1)[:, 0]


def falls(beta: float, n: float, of_energy: tuple[float, float]) -> bool:
    """True if every update lowers an energy by half the squared step at least, which has a beta and an n of its own."""
    state, patterns = 3 * normal(1, DRAWS, 5), normal(2, 9, 5)
    energy_beta, energy_n = of_energy
    for _ in range(20):
        after = hopfield_retrieve(state, patterns, beta, n=n)
        before, now = (hopfield_energy(x, patterns, energy_beta, n=energy_n) for x in (state, after))
        if not (before - now >= (after - state).square().sum(-1) / 2 - 1e-12).all():
            return False
        state = after
    return True


@pytest.mark.parametrize("n", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("beta", [0.3, 1.0, 4.0])
def test_lemma_2_1_the_energy_falls(beta: float, n: float) -> None:
    """By the concave-convex procedure, from anywhere; with the beta or the n of another memory it does not."""
    assert falls(beta, n, (beta, n))
    assert not falls(beta, n, (3 * beta, n))
    assert not falls(beta, n, (beta, n + 20))


def test_remark_2_1_slots_are_patterns_that_no_state_is_like() -> None:
    """n vectors that lie in n dimensions more, where the states are 0: softmax then reads what n slots give."""
    state, patterns, n = normal(1, 6, 5), normal(2, 4, 5), 3
    wider = torch.cat([torch.nn.functional.pad(patterns, (0, n)), torch.eye(5 + n, dtype=torch.float64)[5:]])
    read = hopfield_retrieve(torch.nn.functional.pad(state, (0, n)), wider, 0.7, n=0.0)
    close(read[:, :5], hopfield_retrieve(state, patterns, 0.7, n=n))


def test_theorem_3_1_retrieval_ends_where_the_energy_is_stationary() -> None:
    state, patterns = 3 * normal(1, DRAWS, 5), normal(2, 9, 5)
    end = hopfield_retrieve(state, patterns, 1.0, steps=500).requires_grad_()
    assert (hopfield_retrieve(end, patterns, 1.0) - end).abs().max() < 1e-9
    (slope,) = torch.autograd.grad(hopfield_energy(end, patterns, 1.0).sum(), end)
    assert slope.abs().max() < 1e-9


@pytest.mark.parametrize("beta", [0.5, 2.0, 8.0])
def test_theorem_3_2_the_upper_bounds(beta: float) -> None:
    """|T(x) - y| <= 2 m e and |T_1(x) - y| <= m (1 - g + 2 g e), m the largest norm: lower if e > 1/2, and only then.

    The paper says: lower for all x. Without e > 1/2 the bound of softmax_1 is the higher one, and an error of softmax_1
    itself lies above the bound of softmax.
    """
    patterns = 2 * normal(1, DRAWS, 6, 4)
    state = near(patterns, 1.0, 2)
    one, dense = errors(patterns, state, beta)
    (g, e), m = numbers(patterns, state, beta), patterns.norm(dim=-1).amax(-1)
    bound, dense_bound = m * (1 - g + 2 * g * e), 2 * m * e
    assert (one <= bound + 1e-12).all()
    assert (dense <= dense_bound + 1e-12).all()
    told = 1 - g > 1e-9  # otherwise both bounds are equal up to rounding
    assert torch.equal((bound < dense_bound)[told], (e > 0.5)[told])
    assert 0 < (e > 0.5)[told].sum() < told.sum()
    if beta >= 2:
        assert (one > dense_bound).any()


@pytest.mark.parametrize("beta", [1.0, 8.0])
@pytest.mark.parametrize(("asked", "smaller"), [(1.0, (0.05, 0.2)), (0.0, (0.5, 0.9))], ids=["near", "random"])
def test_corollary_3_2_1_which_error_is_smaller(beta: float, asked: float, smaller: tuple[float, float]) -> None:
    """Of unit vectors, softmax_1 errs less exactly if cos(T(x), y) <= |T(x)| (1 + g) / 2; the others err more."""
    patterns = on_a_sphere(1, DRAWS, 10, 8)
    state = torch.nn.functional.normalize(asked * patterns[:, 0] + on_a_sphere(2, DRAWS, 8), dim=-1)
    one, dense = errors(patterns, state, beta)
    read, g = hopfield_retrieve(state, patterns, beta, n=0.0), numbers(patterns, state, beta)[0]
    cosine = torch.nn.functional.cosine_similarity(read, patterns[:, 0], dim=-1)
    condition = cosine <= read.norm(dim=-1) * (1 + g) / 2
    assert (one <= dense)[condition].all()
    assert (one > dense)[~condition].all(), "without the condition"
    assert smaller[0] < condition.double().mean() < smaller[1]


def stored(width: int, count: int, radius: float, beta: float, asked: float) -> tuple[Tensor, Tensor]:
    """Of random patterns on a sphere: which keep all their states within `asked`, and which are separated (S)."""
    patterns = radius * on_a_sphere(width, 100, count, width)
    inner = torch.einsum("sd,snd->sn", patterns[:, 0], patterns)
    gap = inner[:, 0] - inner[:, 1:].amax(-1) - 2 * radius * asked
    rest = (count - 1) * (-beta * gap).exp()
    lost = 1 / (1 + math.exp(beta * radius * (radius - asked)))
    kept = torch.ones(100, dtype=torch.bool)
    for seed in range(5):
        kept &= errors(patterns, near(patterns, asked, seed), beta)[0] <= asked
    return kept, radius * (lost + 2 * rest) <= asked


def test_lemma_c_2_and_theorem_3_3_capacity() -> None:
    """Patterns that are separated are stored: x within R of y is mapped there, if the bound of 3.2 is R at most.

    On a sphere whose radius grows like sqrt(D), patterns of a number that grows like 2^(D / 2) are separated. On a
    small sphere they are neither separated nor stored.
    """
    shares = []
    for width in (8, 12, 16):
        kept, separated = stored(width, 2 ** (width // 2), 3 * math.sqrt(width), 1.0, 0.5)
        assert kept[separated].all()
        shares.append(separated.double().mean())
    assert min(shares) > 0.9
    kept, separated = stored(16, 2**8, 0.5, 1.0, 0.25)
    assert not separated.any()
    assert not kept.any()


@pytest.mark.parametrize("n", [0.0, 1.0, 4.0])
def test_lemma_c_6_softmax_1_is_lipschitz(n: float) -> None:
    """|softmax_1(a) - softmax_1(b)| in the 1-norm is at most 2 max |a - b|; of scores times 5 it is not."""

    def excess(factor: float) -> Tensor:
        first, size = 2 * normal(1, DRAWS, 6), 10 ** normal(2, DRAWS, 1).clamp(-4, 1)
        second = first + size * normal(3, DRAWS, 6).sign()
        moved = softmax_n(factor * first, n) - softmax_n(factor * second, n)
        return moved.abs().sum(-1) - 2 * (first - second).abs().amax(-1)

    assert (excess(1.0) <= 1e-12).all()
    assert (excess(5.0) > 0).any()


@pytest.mark.parametrize("count", [3, 100])
def test_theorem_3_4_the_layer_is_lipschitz_in_its_parameters(count: int) -> None:
    """Lemma C.7, on which the generalisation bound of Theorem 3.4 rests: no number of patterns stands in it.

    f = V^T Y^T softmax_1(beta Y W x), with |x| <= 1 (A1), rows of Y of norm B_Y at most (A2) and |V| <= B_V (A4):
    |f_1 - f_2| <= B_Y |V_1 - V_2| + 2 beta B_V B_Y max |Y (W_1 - W_2) x|. For longer rows, without A2, it breaks.
    """
    beta, width = 1.5, 6

    def excess(length: float) -> Tensor:
        patterns, x = length * on_a_sphere(1, DRAWS, count, width), on_a_sphere(2, DRAWS, width)
        w = normal(3, DRAWS, width, width)
        v = normal(4, DRAWS, width, width)
        size = 10 ** normal(5, 2, DRAWS, 1, 1).clamp(-3, 0.5)
        w_2, v_2 = w + size[0] * normal(6, *w.shape), v + size[1] * normal(7, *v.shape)

        def layer(matrix: Tensor, value: Tensor) -> Tensor:
            weights = softmax_n(beta * torch.einsum("snd,sde,se->sn", patterns, matrix, x))
            return torch.einsum("sn,snd,sde->se", weights, patterns, value)

        moved, *both = torch.linalg.matrix_norm(torch.stack([v - v_2, v, v_2]), 2)
        scores = torch.einsum("snd,sde,se->sn", patterns, w - w_2, x).abs().amax(-1)
        bound = moved + 2 * beta * torch.maximum(*both) * scores  # with B_Y = 1
        return (layer(w, v) - layer(w_2, v_2)).norm(dim=-1) - bound

    assert (excess(1.0) <= 1e-12).all()
    assert (excess(30.0) > 0).any()


def test_the_energy_has_no_negative_slots() -> None:
    with pytest.raises(ValueError, match="needs n >= 0, got -1"):
        hopfield_energy(torch.zeros(2), torch.zeros(3, 2), 1.0, n=-1)
