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
    "no_op_patterns",
    "polynomial",
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


def polynomial(scores: Tensor, order: int = 10, dim: int = -1) -> Tensor:
    """Weights by a power of the scores: p_j = s_j^order / sum_k s_k^order.

    Args:
        scores: any shape; masked keys have score 0, not -inf. Any factor of a row cancels, so beta does nothing here.
        order: of the polynomial. An even one weighs a pattern and its negative alike.
        dim: the key axis.

    Returns:
        Weights of the same shape; each row sums to 1 in absolute value, or is all zeros where all scores are 0.

    Source: Krotov & Hopfield (2016), eq. 2, as a separation function; order 10 is OutEffHop's baseline (appendix D.2).
    """
    largest = scores.detach().abs().amax(dim, keepdim=True)  # a power of the raw scores would overflow
    powers = (scores / torch.where(largest == 0, 1, largest)) ** order
    total = powers.abs().sum(dim, keepdim=True)
    return powers / torch.where(total == 0, 1, total)


def no_op_patterns(patterns: Tensor, threshold: float, key_mask: Tensor | None = None) -> Tensor:
    """Which stored patterns are outliers: cosine with every other pattern below a threshold; (..., N) bool.

    The paper leaves the similarity open; the cosine is ours. A pattern without others is kept.

    Args:
        patterns: (..., N, D).
        threshold: in [-1, 1].
        key_mask: (..., N) bool, False where there is only padding: compared with none, and never an outlier.

    Raises:
        ValueError: the threshold is no cosine.

    Source: OutEffHop (Hu et al., 2024), appendix B.1, steps 1 to 3.
    """
    if not -1 <= threshold <= 1:
        raise ValueError(f"the no-op threshold is a cosine, between -1 and 1; got {threshold}.")
    unit = torch.nn.functional.normalize(patterns.to(torch.promote_types(patterns.dtype, torch.float32)), dim=-1)
    others = ~torch.eye(unit.shape[-2], dtype=torch.bool, device=unit.device)
    if key_mask is not None:
        others = others & key_mask[..., None, :] & key_mask[..., :, None]
    similar = (unit @ unit.mT >= threshold) & others
    return others.any(-1) & ~similar.any(-1)


def hopfield_retrieve(
    state: Tensor,
    patterns: Tensor,
    beta: float,
    *,
    n: float = 1.0,
    steps: int = 1,
    normalizer: str = "softmax_n",
    key_mask: Tensor | None = None,
) -> Tensor:
    """Retrieval dynamics xi <- patterns^T normalizer(beta * patterns xi), repeated; (..., D).

    Args:
        state: (..., D), the query states.
        patterns: (..., N, D), the stored patterns; axes of size 1 in front are shared, not copied.
        beta: inverse temperature, inside the normaliser.
        n: of `softmax_n`; ignored by the others.
        steps: number of updates, at least 1.
        normalizer: "softmax_n", "softmax", "sparsemax", "entmax15" or "polynomial" (of order 10).
        key_mask: (..., N) bool, True where the pattern is stored; None means all are.

    Raises:
        ValueError: `steps` < 1, an unknown normaliser, no patterns, or a state that sees none by `key_mask`. With
            "softmax_n" and n > 0 such a state becomes zero.

    Source: OutEffHop (Hu et al., 2024), Lemma 2.1 and section 2.4.
    """
    weigh = _normaliser(normalizer, n)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}.")
    if not patterns.shape[-2]:
        raise ValueError("the memory is empty; store at least one pattern.")
    if key_mask is not None and not (normalizer == "softmax_n" and n > 0) and not bool(key_mask.any(-1).all()):
        raise ValueError(
            f"a row has no pattern left, which {normalizer} cannot read; drop such rows, or use "
            f"softmax_n (outeffhop), which reads zero there."
        )
    for _ in range(steps):
        scores = beta * torch.einsum("...nd,...d->...n", patterns, state)
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask, 0.0 if normalizer == "polynomial" else -math.inf)
        state = torch.einsum("...n,...nd->...d", weigh(scores), patterns)
    return state


def _normaliser(name: str, n: float) -> Callable[[Tensor], Tensor]:
    known: dict[str, Callable[[Tensor], Tensor]] = {"sparsemax": sparsemax, "entmax15": entmax15}
    known |= {"softmax_n": lambda scores: softmax_n(scores, n), "softmax": lambda scores: torch.softmax(scores, -1)}
    known |= {"polynomial": polynomial}
    if name not in known:
        raise ValueError(f"unknown normalizer {name!r}; known: {', '.join(known)}.")
    return known[name]
