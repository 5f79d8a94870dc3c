"""The papers' formulas on plain tensors: the readable reference for every variant.

Axes: B batch, H head, Q query, K key, L token, D head width, N pattern. Scores arrive scaled and masked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

CHUNK = 128  # queries per block of the causal linear form; any value gives the same result


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


def sparsemax(scores: Tensor, dim: int = -1) -> Tensor:
    """Euclidean projection of a row of scores on the simplex: p = max(s - tau, 0), sum p = 1.

    Source: Martins & Astudillo (2016); the separation function of SparseHopfield (Hu et al., 2023).
    """
    centred = _centred(scores, dim)
    with torch.no_grad():
        ordered = centred.sort(dim, descending=True).values
        rank = _ranks(ordered, dim)
        total = ordered.cumsum(dim)
        size = (1 + rank * ordered > total).sum(dim, keepdim=True)
        threshold = (total.gather(dim, size - 1) - 1) / size
    inside = (centred - threshold).relu()  # a score exactly on the threshold is outside, in the gradient too
    # One Newton step on sum p = 1 changes nothing in value and gives the threshold its exact gradient.
    threshold = threshold + (inside.sum(dim, keepdim=True) - 1) / (inside > 0).sum(dim, keepdim=True)
    return (centred - threshold).relu()


def entmax15(scores: Tensor, dim: int = -1) -> Tensor:
    """1.5-entmax: p = max(s / 2 - tau, 0)^2 with sum p = 1, between softmax and sparsemax.

    Source: Peters, Niculae & Martins (2019); the separation function of STanHop (Wu et al., 2024) at alpha = 1.5.
    """
    centred = _centred(scores / 2, dim)
    with torch.no_grad():
        ordered = centred.sort(dim, descending=True).values
        rank = _ranks(ordered, dim)
        mean = ordered.cumsum(dim) / rank
        variance = ordered.square().cumsum(dim) - rank * mean.square()
        thresholds = mean - ((1 - variance) / rank).clamp_min(0).sqrt()
        size = (thresholds <= ordered).sum(dim, keepdim=True)
        threshold = thresholds.gather(dim, size - 1)
    inside = (centred - threshold).clamp_min(0)
    slope = 2 * inside.detach().sum(dim, keepdim=True)
    threshold = threshold + (inside.square().sum(dim, keepdim=True) - 1) / slope
    return (centred - threshold).clamp_min(0).square()


def _centred(scores: Tensor, dim: int) -> Tensor:
    """Scores less their maximum, cut at -2: the threshold of both normalisers lies above -1."""
    return (scores - scores.detach().amax(dim, keepdim=True)).clamp_min(-2.0)


def _ranks(ordered: Tensor, dim: int) -> Tensor:
    shape = [1] * ordered.dim()
    shape[dim] = -1
    return torch.arange(1, ordered.shape[dim] + 1, device=ordered.device, dtype=ordered.dtype).view(shape)


def simple_attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, key_mask: Tensor | None = None, length: str = "true"
) -> Tensor:
    """SimpleTRON attention, linear in length: A = L^(-1/2) q (k^T v), no softmax and no 1/sqrt(D).

    Args:
        q: (B,H,Q,D).
        k: (B,H,K,D).
        v: (B,H,K,D).
        causal: query t sees the keys up to K - Q + t (aligned to the bottom right) and L is counted per query.
        key_mask: (B,K) bool, True where the key is a real token; None means all are.
        length: "true" counts the real keys that the query may see (at least 1), "fixed" counts padding too.

    Returns:
        (B,H,Q,D).

    Raises:
        ValueError: `causal` with more queries than keys, or an unknown `length`.

    Source: SimpleTRON (2021), section 3; the causal form and the true length are ours.
    """
    if length not in ("true", "fixed"):
        raise ValueError(f"length must be 'true' or 'fixed', got {length!r}.")
    queries, keys = q.shape[2], k.shape[2]
    if causal and queries > keys:
        raise ValueError(f"causal simple attention needs at least as many keys as queries, got {keys} < {queries}.")
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    counted = key_mask if key_mask is not None and length == "true" else k.new_ones(1, keys, dtype=torch.bool)
    if not causal:
        visible_BQ = counted.sum(-1, keepdim=True)
        mixed = q @ (k.transpose(2, 3) @ v)
    else:
        visible_BQ = counted.cumsum(-1)[:, keys - queries :]
        mixed = _causal_linear(q, k, v)
    return mixed * visible_BQ.clamp_min(1).to(mixed.dtype).rsqrt()[:, None, :, None]


def _causal_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q_t sum_{i <= t + K - Q} k_i v_i^T in blocks: quadratic inside a block, a running state between them."""
    queries, past = q.shape[2], k.shape[2] - q.shape[2]
    state = k[:, :, :past].transpose(2, 3) @ v[:, :, :past]
    k, v = k[:, :, past:], v[:, :, past:]
    if queries <= CHUNK:
        return q @ state + (q @ k.transpose(2, 3)).tril() @ v
    pad = -queries % CHUNK
    padded = (torch.nn.functional.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
    q_BHNCD, k_BHNCD, v_BHNCD = (t.view(*t.shape[:2], -1, CHUNK, t.shape[3]) for t in padded)
    sums = k_BHNCD.transpose(3, 4) @ v_BHNCD
    before = sums.cumsum(2) - sums + state.unsqueeze(2)
    inside = (q_BHNCD @ k_BHNCD.transpose(3, 4)).tril() @ v_BHNCD
    return (q_BHNCD @ before + inside).flatten(2, 3)[:, :, :queries]


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
