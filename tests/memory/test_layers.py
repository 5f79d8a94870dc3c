"""The memory modules against hand computations, the paper's energies and its no-op classification."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_attn_swap import functional
from hf_attn_swap.memory import HopfieldRetrieval, no_op_patterns

from .harness import built, close, normal, retrieval, tensor

LN2, LN3 = math.log(2), math.log(3)


# By hand: patterns (1, 0) and (0, 2), so a state (a, b) has the scores a and 2b.
@pytest.mark.parametrize(
    ("normalizer", "state", "wanted"),
    [
        ("outeffhop", (LN2, 0.0), (2 / 4, 2 * 1 / 4)),
        ("softmax", (LN2, 0.0), (2 / 3, 2 * 1 / 3)),
        ("sparsemax", (0.5, 0.0), (0.75, 2 * 0.25)),
        ("sparsemax", (0.0, 0.5), (0.0, 2.0)),
        ("entmax", (0.4, 0.0), (0.8**2, 2 * 0.6**2)),
        ("polynomial", (1.0, -0.25), (1024 / 1025, 2 / 1025)),
    ],
)
def test_one_step_by_hand(normalizer: str, state: tuple[float, ...], wanted: tuple[float, ...]) -> None:
    stored = tensor([1.0, 0.0], [0.0, 2.0])
    close(retrieval(normalizer=normalizer)(tensor(*state), stored), tensor(wanted))
    # beta is inside the normalizer: half the state at twice the beta is the same
    close(retrieval(normalizer=normalizer, beta=2.0)(tensor(*state) / 2, stored), tensor(wanted))


def test_values_come_from_keys() -> None:
    """Pooling and layer against the formula with V = Y W_K W_V, written out for one head."""
    pooling, (bags,) = built("pooling", "outeffhop", heads=1)
    keys, states = bags @ pooling.key.weight.mT, pooling.query.weight
    weights = functional.softmax_n(states @ keys.mT / math.sqrt(8))
    close(pooling(bags), weights @ (keys @ pooling.value.weight.mT))
    layer, (states,) = built("layer", "outeffhop", heads=1)
    keys = layer.key.weight
    weights = functional.softmax_n(states @ layer.query.weight.mT @ keys.mT / math.sqrt(8))
    close(layer(states), weights @ (keys @ layer.value.weight.mT))


def energy(normalizer: str, state: Tensor, stored: Tensor, beta: float) -> Tensor:
    """-Psi*(beta Y xi) / beta + xi^2 / 2, Psi* the conjugate of which the normalizer is the gradient.

    SparseHopfield and STanHop: max_p <p, z> + H(p) with the Tsallis entropies of order 2 and 1.5. Those of softmax and
    softmax_1 are in test_theorems.py.
    """
    scores = beta * state @ stored.T
    weights = functional.sparsemax(scores) if normalizer == "sparsemax" else functional.entmax15(scores)
    tsallis = (1 - weights) * weights / 2 if normalizer == "sparsemax" else (weights - weights**1.5) * 4 / 3
    return state.square().sum(-1) / 2 - (weights * scores + tsallis).sum(-1) / beta


@pytest.mark.parametrize("normalizer", ["sparsemax", "entmax"])
@pytest.mark.parametrize("beta", [0.3, 1.0, 4.0])
def test_energy_falls(normalizer: str, beta: float) -> None:
    """With identity weights, from anywhere; the polynomial's normalized update has no such energy."""
    state, stored = 3 * normal(1, 20, 5), normal(2, 9, 5)
    step = retrieval(normalizer=normalizer, beta=beta)
    for _ in range(30):
        after = step(state, stored)
        assert (energy(normalizer, after, stored, beta) <= energy(normalizer, state, stored, beta) + 1e-12).all()
        state = after


def test_fixed_points() -> None:
    """Orthogonal patterns of length 2: exact for the sparse three, near for the others; zero is none for softmax_1."""
    stored = 2 * torch.eye(4, dtype=torch.float64)
    for normalizer in ("sparsemax", "entmax", "polynomial"):
        assert torch.equal(retrieval(normalizer=normalizer)(stored, stored), stored)
    for normalizer in ("softmax", "outeffhop"):
        close(retrieval(normalizer=normalizer, beta=8.0)(stored, stored), stored, 1e-12)
    close(retrieval()(torch.zeros(1, 4, dtype=torch.float64), stored), torch.full((1, 4), 2 / 5, dtype=torch.float64))
    # a unit pattern at beta 1 has no rest of its own: e / (e + 1 + 1) of itself is read, and ever less
    unit = torch.eye(2, dtype=torch.float64)
    close(retrieval()(unit[0], unit)[0, 0], tensor(math.e / (math.e + 2))[0])


def test_no_op_by_threshold() -> None:
    stored = tensor([1.0, 0.1, 0.0], [1.0, 0.0, 0.1], [0.9, 0.1, 0.1], [0.0, -3.0, 4.0])
    outliers = no_op_patterns(stored, 0.5)
    assert outliers.tolist() == [False, False, False, True]
    state = normal(1, 4, 3)
    close(retrieval(no_op_threshold=0.5)(state, stored), retrieval()(state, stored[:3]))
    both = torch.tensor([True, False, False, False])
    close(retrieval(no_op_threshold=0.5)(state, stored, no_op=both), retrieval()(state, stored[1:3]))
    # all alike, or alone: nothing is an outlier; padding is compared with nothing
    assert not no_op_patterns(stored[:1], 0.5).any()
    alone = torch.tensor([False, False, True, False])
    assert no_op_patterns(torch.cat([stored[2:], stored[2:]]), 0.5).tolist() == [False] * 4
    assert no_op_patterns(stored[[2, 3, 2, 2]], 0.5, ~alone).tolist() == [False, True, False, False]
    padded = torch.stack([stored, stored])
    masks = torch.tensor([[False, True, True, False], [False] * 4])
    got = HopfieldRetrieval(no_op_threshold=0.5)(state.expand(2, 4, 3), padded, key_padding_mask=masks)
    close(got[0], torch.zeros(4, 3).double())  # two unlike ones are both outliers
    close(got[1], retrieval()(state, stored[:3]))


def test_polynomial() -> None:
    """Scale-free, even, all zero without any similarity; the derivative leaves nothing out."""
    scores = normal(1, 3, 5)
    close(functional.polynomial(scores), scores**10 / (scores**10).sum(-1, keepdim=True))
    close(functional.polynomial(-1e30 * scores), functional.polynomial(scores))
    close(functional.polynomial(scores, order=3, dim=0), scores**3 / (scores**3).abs().sum(0))
    zeros = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    functional.polynomial(zeros).sum().backward()
    assert torch.equal(functional.polynomial(zeros), zeros)
    assert torch.equal(zeros.grad, torch.zeros(2, 3))
    assert torch.autograd.gradcheck(functional.polynomial, (scores.requires_grad_(),))
