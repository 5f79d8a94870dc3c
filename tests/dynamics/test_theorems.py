"""The theorems of the dynamics (docs/mathematics.md, section Dynamics of tokens), and the orders of the integrators."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from hf_attn_swap.dynamics import (
    HeadMatrices,
    Trajectory,
    clusters,
    eigenvalues,
    hyperplane_coordinates,
    leaders,
    matrix_rank,
    random_tokens,
    simulate,
    vertex_share,
)
from hf_attn_swap.functional import softmax_n

SEEDS = range(2)


def identity(width: int) -> Tensor:
    return torch.eye(width, dtype=torch.float64)


def positive(width: int, seed: int) -> Tensor:
    root = torch.randn(width, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T / width + 0.1 * identity(width)


def random_heads(count: int, width: int, head_dim: int, seed: int) -> HeadMatrices:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (
        torch.randn(count, width, head_dim, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    output = torch.randn(count, head_dim, width, generator=generator, dtype=torch.float64)
    return HeadMatrices(query=query, key=key, value=value, output=output, scale=head_dim**-0.5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [2, 3])
def test_tokens_end_at_vertices_of_a_polytope(width: int, seed: int) -> None:
    """V = I, Q^T K > 0: every token comes to the one it attends to, as e^-t, and those are corners."""
    heads = HeadMatrices.plain(positive(width, seed), identity(width))
    trajectory = simulate(random_tokens(40, width, low=-1, high=1, seed=seed), heads, time=14, step=0.05)
    z, wins = trajectory.z[160], trajectory.attention(160)[0].argmax(-1)
    assert float((z - z[wins]).norm(dim=-1).max()) < 0.02  # at t = 8
    share, corners = vertex_share(trajectory.z[-1], start=trajectory.z[0])
    assert share == 1.0
    assert 1 <= corners <= len(leaders(trajectory.attention(-1)[0])) + 1


@pytest.mark.parametrize("seed", SEEDS)
def test_the_polytope_needs_queries_and_keys_that_agree(seed: int) -> None:
    """Theorem 2 with and without Q^T K > 0: corners that lead themselves, or a single point inside the hull."""
    corners = {}
    for sign in (1, -1):
        heads = HeadMatrices.plain(sign * identity(2), identity(2))
        trajectory = simulate(random_tokens(20, 2, low=-1, high=1, seed=seed), heads, time=12, step=0.1)
        share, corners[sign] = vertex_share(trajectory.z[-1], start=trajectory.z[0])
        assert share == 1.0
        if sign == 1:
            wins = trajectory.attention(-1)[0].argmax(-1)
            assert (wins[wins] == wins).all()
    assert corners[1] > 1
    assert corners[-1] == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_the_low_rank_limit_needs_a_positive_product(seed: int) -> None:
    """Theorem 1: P(t) has come to its limit at t = 8 if Q K > 0, and has not if Q K < 0."""
    moved = {}
    for sign in (1, -1):
        heads = HeadMatrices.plain(sign * identity(1), identity(1))
        trajectory = simulate(random_tokens(40, 1, low=-1, high=1, seed=seed), heads, time=12, step=0.05)
        moved[sign] = float((trajectory.attention(-1) - trajectory.attention(160)).abs().max())
    assert moved[1] < 1e-12
    assert moved[-1] > 0.1


def test_a_product_of_a_polytope_and_a_subspace() -> None:
    """V normal, 1 on a plane and -0.4 across it: corners of a polytope in the plane, and tokens that stay apart across.

    Without the condition across the plane (V = I), the tokens are not at the corners of what they are in the plane.
    The last row of the report's table (section 1.1), which is the clusters paper's theorem for a paranormal V.
    """
    basis = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0]
    inside, across = {}, {}
    for rest in (-0.4, 1.0):
        value = basis @ torch.diag(torch.tensor([1.0, 1.0, rest], dtype=torch.float64)) @ basis.T
        heads = HeadMatrices.plain(identity(3), identity(3), value)
        trajectory = simulate(random_tokens(30, 3, low=-1, high=1, seed=0), heads, time=12, step=0.1, value="head")
        plane = trajectory.z @ basis[:, :2]
        inside[rest] = vertex_share(plane[-1], start=plane[0])
        last = (trajectory.x[-1] @ basis[:, 2]).sort().values
        across[rest] = int((last.diff() > 1e-3).sum())
    assert inside[-0.4] == (1.0, 3)
    assert across[-0.4] > 10
    assert inside[1.0][0] < 1.0


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("time", [8.0, 12.0])
def test_attention_of_scalars_has_low_rank(seed: int, time: float) -> None:
    one = identity(1)
    tokens = random_tokens(40, 1, low=-1, high=1, seed=seed)
    trajectory = simulate(tokens, HeadMatrices.plain(one, one), time=time, step=0.05)
    assert matrix_rank(trajectory.attention(0)[0], 1e-12) > 2
    assert matrix_rank(trajectory.attention(-1)[0]) <= 2


@pytest.mark.parametrize("seed", SEEDS)
def test_three_hyperplanes(seed: int) -> None:
    """A simple lambda_1 > 0 with <Q phi, K phi> > 0: the coordinate along its left eigenvector takes three values."""
    basis = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))[0]
    value = basis @ torch.diag(torch.tensor([1.0, 0.3, -0.4], dtype=torch.float64)) @ basis.T
    heads = HeadMatrices.plain(identity(3), identity(3), value)
    trajectory = simulate(random_tokens(20, 3, low=-1, high=1, seed=seed), heads, time=12, step=0.05, value="head")
    coordinates = hyperplane_coordinates(trajectory, value)[-1].sort().values
    edges = [0, *(coordinates.diff() > 0.05).nonzero().flatten().add(1).tolist(), len(coordinates)]
    groups = [coordinates[start:end] for start, end in itertools.pairwise(edges)]
    assert len(groups) <= 3
    assert max(float(group.max() - group.min()) for group in groups) < 1e-3


def test_decay_to_the_origin() -> None:
    """V = -I: tokens come to 0 as t^(-1/2), so slowly that 2 t eig(Cov x) -> 1."""
    heads = HeadMatrices.plain(identity(2), identity(2))
    spread = {}
    for time in (20.0, 150.0):
        tokens = random_tokens(60, 2, low=-1, high=1, seed=0)
        x = simulate(tokens, heads, time=time, step=0.1, value=-identity(2), rescale=False).z[-1]
        assert float(x.norm(dim=-1).max()) < 3 / math.sqrt(time)
        spread[time] = 2 * time * torch.linalg.eigvalsh(torch.cov(x.T, correction=0))
    errors = {time: float((values - 1).abs().max()) for time, values in spread.items()}
    assert errors[150.0] < 0.2
    assert errors[150.0] < errors[20.0]


@pytest.mark.parametrize("count", [1, 4, 16])
def test_largest_eigenvalue_of_several_heads_is_their_number(count: int) -> None:
    """Proposition 1, with the vector that attains it; softmax_1, whose rows sum to less than 1, stays below."""
    heads = random_heads(count, 12, 3, seed=count)
    trajectory = simulate(random_tokens(30, 12, seed=1), heads, time=2, step=0.1)
    for index in (0, 10, -1):
        total = trajectory.attention(index).sum(0)
        assert float(eigenvalues(total).abs().max()) == pytest.approx(count, abs=1e-12)
        ones = torch.ones(len(total), dtype=torch.float64)
        torch.testing.assert_close(total @ ones, count * ones)
    scores = torch.randn(count, 30, 30, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    below = eigenvalues(softmax_n(scores, 1.0).sum(0)).abs().max()
    assert 0.9 * count < float(below) < count - 1e-3


def slope(method: str, **kwargs: object) -> float:
    """Of the logarithm of the error against that of the step."""
    heads = random_heads(2, 4, 2, seed=3)
    tokens = random_tokens(8, 4, low=-1, high=1, seed=5)
    exact = simulate(tokens, heads, time=1, step=1, method="dopri5", **kwargs).z[-1]  # type: ignore[arg-type]
    steps = [0.1, 0.05, 0.025]
    errors = [
        float((simulate(tokens, heads, time=1, step=step, method=method, **kwargs).z[-1] - exact).norm())  # type: ignore[arg-type]
        for step in steps
    ]
    return math.log(errors[0] / errors[-1]) / math.log(steps[0] / steps[-1])


@pytest.mark.parametrize("value", ["identity", "head"])
def test_order_of_the_methods(value: str) -> None:
    assert 3.8 < slope("rk4", value=value) < 4.3
    assert 0.9 < slope("published", value=value) < 1.2


def published(z: Tensor, step: float, steps: int) -> Tensor:
    """The report's scheme, literally: attention once a step, then stages that add one vector to all tokens alike."""
    for index in range(steps):
        x = math.exp(index * step) * z
        weights = torch.softmax(x @ x.T, -1)
        moved = []
        for i in range(len(z)):

            def velocity(shift: Tensor | float, i: int = i, weights: Tensor = weights, z: Tensor = z) -> Tensor:
                shifted = z + shift
                return weights[i] @ (shifted - shifted[i])

            k1 = step * velocity(0.0)
            k2 = step * velocity(k1 / 2)
            k3 = step * velocity(k2 / 2)
            k4 = step * velocity(k3)
            moved.append(z[i] + (k1 + 2 * k2 + 2 * k3 + k4) / 6)
        z = torch.stack(moved)
    return z


def test_the_published_scheme_is_forward_euler() -> None:
    tokens = random_tokens(12, 2, low=-1, high=1, seed=2)
    ours = simulate(tokens, HeadMatrices.plain(identity(2), identity(2)), time=2, step=0.1, method="published").z[-1]
    assert torch.allclose(ours, published(tokens, 0.1, 20), atol=1e-13)


@pytest.mark.parametrize("value", ["identity", "head", "matrix"])
def test_rescaling_changes_nothing(value: str) -> None:
    """x = e^{tR} z, whatever the values are; one head or several that do not commute."""
    for count in (1, 3):
        heads = random_heads(count, 3, 2, seed=count)
        chosen: str | Tensor = positive(3, 7) if value == "matrix" else value
        tokens = random_tokens(6, 3, low=-0.3, high=0.3, seed=1)
        pair: list[Trajectory] = [
            simulate(tokens, heads, time=0.5, step=0.1, method="dopri5", value=chosen, rescale=rescale)
            for rescale in (True, False)
        ]
        assert torch.allclose(pair[0].x, pair[1].x, rtol=1e-6, atol=1e-8)
        assert torch.allclose(pair[0].attention(-1), pair[1].attention(-1), atol=1e-6)


@pytest.mark.slow
def test_long_times_do_not_overflow() -> None:
    """Sixteen heads grow as e^{16 t}; at t = 50 that is e^800."""
    heads = random_heads(16, 8, 2, seed=0)
    trajectory = simulate(random_tokens(20, 8, seed=0), heads, time=50, step=0.1)
    assert trajectory.z.isfinite().all()
    assert clusters(trajectory).counts[-1] <= 20
    with pytest.raises(ValueError, match=r"diverged at t = .*rescale=True"):
        simulate(random_tokens(20, 8, seed=0), heads, time=50, step=0.1, rescale=False)
