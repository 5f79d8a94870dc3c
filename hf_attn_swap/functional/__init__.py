"""The papers' formulas on plain tensors: the readable reference for every variant.

Axes: B batch, H head, Q query, K key, L token, D head width, N pattern. Scores arrive scaled and masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .linear import CHUNK, Past, simple_attention
from .sparse import entmax15, sparsemax

__all__ = [
    "CHUNK",
    "Past",
    "belief_projection",
    "check_clip",
    "clip",
    "clipped_softmax",
    "entmax15",
    "hopfield_retrieve",
    "hopfield_scores",
    "simple_attention",
    "softmax_n",
    "sparsemax",
]


def softmax_n(scores: Tensor, n: float | Tensor = 1.0, dim: int = -1) -> Tensor:
    """Softmax with n extra in the denominator: p_j = exp(s_j) / (n + sum_k exp(s_k)).

    Args:
        scores: any shape, scaled and masked.
        n: how many keys of score 0 and value 0 the row may also attend to, at least 0.
        dim: the key axis.

    Returns:
        Weights of the same shape; each row sums to less than 1. A fully masked row is all zeros for n > 0.

    Raises:
        ValueError: n is negative.

    Source: OutEffHop (Hu et al., 2024), eq. 2.2; stable for every n by shifting with max(log n, max_j s_j).
    """
    if isinstance(n, (int, float)):
        if n < 0:
            raise ValueError(f"softmax_n needs n >= 0, got {n}; n = 0 is ordinary softmax.")
        log_n = scores.new_full((1,), math.log(n) if n > 0 else -math.inf)
    else:
        log_n = n.to(scores.dtype).log()
    # The weights do not depend on the shift, so its gradient is left out.
    shift = torch.maximum(scores.detach().amax(dim, keepdim=True), log_n.detach())
    exponentials = (scores - shift).exp()
    return exponentials / ((log_n - shift).exp() + exponentials.sum(dim, keepdim=True))


def clipped_softmax(
    scores: Tensor, gamma: float | Tensor, zeta: float | Tensor, dim: int = -1, n: float | Tensor = 0.0
) -> Tensor:
    """Stretched and clipped softmax: clip((zeta - gamma) * softmax_n(s) + gamma, 0, 1).

    Args:
        scores: any shape. The caller sets masked positions to 0 afterwards.
        gamma: lower end of the stretch, at most 0.
        zeta: upper end, at least 1.
        dim: the key axis.
        n: as in `softmax_n`; 0 is the original clipped softmax.

    Raises:
        ValueError: gamma > 0 or zeta < 1, given as numbers.

    Source: Bondarenko et al. (2023), eq. 4; with n = 1, Clipped OutEffHop.
    """
    check_clip(gamma, zeta)
    plain = isinstance(n, (int, float)) and n == 0
    return clip(torch.softmax(scores, dim) if plain else softmax_n(scores, n, dim), gamma, zeta)


def check_clip(gamma: float | Tensor, zeta: float | Tensor) -> None:
    """Raise ValueError unless gamma is at most 0 and zeta at least 1 (numbers only: tensors are not read)."""
    if (isinstance(gamma, (int, float)) and not gamma <= 0) or (isinstance(zeta, (int, float)) and not zeta >= 1):
        raise ValueError(f"clipped softmax needs gamma <= 0 and zeta >= 1, got gamma={gamma}, zeta={zeta}.")


def clip(weights: Tensor, gamma: float | Tensor, zeta: float | Tensor) -> Tensor:
    """Stretch weights to [gamma, zeta] and clip them to [0, 1]; the derivative at exactly 0 and 1 is 1."""
    return torch.clamp((zeta - gamma) * weights + gamma, 0.0, 1.0)


def belief_projection(heads: Tensor, values: Tensor, *, per_head: bool = False, eps: float = 1e-8) -> Tensor:
    """Take from each token's read-out its projection on the token's own value.

    delta_i = y_i - (<y_i, v_i> / max(<v_i, v_i>, eps)) v_i, over the joined heads or per head.

    Args:
        heads: (B,L,H,D), what the attention read.
        values: (B,L,H,D), each token's own value vectors (with bias, never rotated).
        per_head: project every head on its own (belief*'s second term) instead of all heads as one vector.
        eps: floor of <v, v>; a zero value takes nothing away.

    Returns:
        (B,L,H,D) in the dtype of `heads`; inner products are accumulated in fp32 at least.

    Source: BeliefFormer, eq. 10 (joined) and 13 (per head).
    """
    axes = (-1,) if per_head else (-2, -1)
    wide = torch.promote_types(heads.dtype, torch.float32)
    y, v = heads.to(wide), values.to(wide)
    share = (y * v).sum(axes, keepdim=True) / (v * v).sum(axes, keepdim=True).clamp_min(eps)
    return torch.addcmul(y, share, v, value=-1).to(heads.dtype)


def hopfield_scores(scores: Tensor, previous: Tensor, alpha_prime: float | Tensor) -> Tensor:
    """Scores carried across layers: H_l = alpha' * H_{l-1} + (1 - alpha') * S_l.

    Args:
        scores: (B,H,Q,K), this layer's scaled scores before the mask.
        previous: (B,H,Q,K), H of the layer below (zeros below the first).
        alpha_prime: share that is kept, in [0, 1]; 0 is ordinary attention.

    Source: modern Hopfield attention (MHA), eq. 10 with the second update of the hidden state.
    """
    return alpha_prime * previous + (1 - alpha_prime) * scores


def hopfield_retrieve(
    state: Tensor,
    patterns: Tensor,
    beta: float,
    *,
    n: float = 1.0,
    steps: int = 1,
    normalizer: str = "softmax_n",
) -> Tensor:
    """Retrieval dynamics xi <- patterns^T normalizer(beta * patterns xi), repeated; (..., D).

    Args:
        state: (..., D), the query states.
        patterns: (..., N, D), the stored patterns.
        beta: inverse temperature, inside the normaliser.
        n: of `softmax_n`; ignored by the others.
        steps: number of updates, at least 1.
        normalizer: "softmax_n", "softmax", "sparsemax" or "entmax15".

    Raises:
        ValueError: `steps` < 1 or an unknown normaliser.

    Source: OutEffHop (Hu et al., 2024), section 2.4.
    """
    known: dict[str, Callable[[Tensor], Tensor]] = {"sparsemax": sparsemax, "entmax15": entmax15}
    known |= {"softmax_n": lambda scores: softmax_n(scores, n), "softmax": lambda scores: torch.softmax(scores, -1)}
    if normalizer not in known:
        raise ValueError(f"unknown normalizer {normalizer!r}; known: {', '.join(known)}.")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    for _ in range(steps):
        weights = known[normalizer](beta * (patterns @ state.unsqueeze(-1)).squeeze(-1))
        state = (weights.unsqueeze(-2) @ patterns).squeeze(-2)
    return state
