"""The formulas of the papers, slowly and literally, on plain tensors: what the package's fast forms are held to.

Axes: B batch, H head, Q query, K key, D head width, L token. `allowed` is True where a query may see a key; a row
that may see nothing gets zeros.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def slow_softmax_n(scores: Tensor, n: float, allowed: Tensor | None = None) -> Tensor:
    """exp(s_j) / (n + sum_k exp(s_k)) over the keys that may be seen."""
    seen = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed.expand(scores.shape)
    top = scores.detach().masked_fill(~seen, -math.inf).amax(-1, keepdim=True)
    top = top.clamp_min(math.log(n)) if n > 0 else top.masked_fill(top == -math.inf, 0.0)
    powers = (scores - top).masked_fill(~seen, -math.inf).exp()
    total = powers.sum(-1, keepdim=True) + (n * torch.exp(-top) if n > 0 else 0.0)
    return powers / total.masked_fill(total == 0, 1.0)


def slow_clipped_softmax(
    scores: Tensor, gamma: float, zeta: float, n: float = 0.0, allowed: Tensor | None = None
) -> Tensor:
    """clip((zeta - gamma) p + gamma, 0, 1), zero where a query may not look."""
    stretched = (zeta - gamma) * slow_softmax_n(scores, n, allowed) + gamma
    clipped = stretched.clamp(0, 1)
    return clipped if allowed is None else clipped * allowed


def slow_sparsemax(scores: Tensor, allowed: Tensor | None = None) -> Tensor:
    """max(s - tau, 0) with sum 1: tau from the largest support whose smallest member stays positive."""
    scores, top, seen = _hidden(scores, allowed)
    ordered, tau = scores.sort(-1, descending=True).values, top - 1
    for size in range(1, scores.shape[-1] + 1):
        trial = (ordered[..., :size].sum(-1, keepdim=True) - 1) / size
        tau = torch.where(ordered[..., size - 1 : size] > trial, trial, tau)
    return (scores - tau).clamp_min(0) * seen


def slow_entmax15(scores: Tensor, allowed: Tensor | None = None) -> Tensor:
    """max(s / 2 - tau, 0)^2 with sum 1: tau solves the quadratic of the largest consistent support."""
    scores, top, seen = _hidden(scores, allowed)
    half, tau = scores / 2, top / 2 - 1
    ordered = half.sort(-1, descending=True).values
    for size in range(2, scores.shape[-1] + 1):
        mean = ordered[..., :size].mean(-1, keepdim=True)
        spread = (ordered[..., :size] - mean).square().sum(-1, keepdim=True)
        trial = mean - ((1 - spread) / size).masked_fill(spread >= 1, 1.0).sqrt()
        tau = torch.where((spread < 1) & (trial <= ordered[..., size - 1 : size]), trial, tau)
    return (half - tau).clamp_min(0).square() * seen


def slow_entmax(scores: Tensor, alpha: float, allowed: Tensor | None = None) -> Tensor:
    """max((alpha - 1) s - tau, 0)^(1 / (alpha - 1)) with sum 1, for 1 < alpha <= 2: tau by 200 halvings."""
    scores, top, seen = _hidden(scores, allowed)
    scaled = ((alpha - 1) * (scores - top)).masked_fill(~seen, -math.inf)
    low, high = torch.full_like(top, -1.0), torch.zeros_like(top)  # the weight of the maximum is 1, or 0
    for _ in range(200):
        tau = (low + high) / 2
        over = (scaled - tau).clamp_min(0).pow(1 / (alpha - 1)).sum(-1, keepdim=True) > 1
        low, high = torch.where(over, tau, low), torch.where(over, high, tau)
    return (scaled - low.detach()).clamp_min(0).pow(1 / (alpha - 1))


def _hidden(scores: Tensor, allowed: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The scores, with keys that may not be seen far below the row's maximum; the maximum; and what may be seen."""
    seen = torch.ones_like(scores, dtype=torch.bool) if allowed is None else allowed.expand(scores.shape)
    lowest = torch.finfo(scores.dtype).min
    top = scores.masked_fill(~seen, lowest).amax(-1, keepdim=True)
    top = top.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return torch.where(seen, scores, top.detach() - 10), top, seen


def slow_simple_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    key_mask: Tensor | None = None,
    length: str = "true",
    allowed: Tensor | None = None,
) -> Tensor:
    """A_t = L_t^(-1/2) sum over the keys that t may see of (q_t . k_i) v_i, one query at a time.

    L_t counts those keys, at least 1; "fixed" counts the padded ones too: all of them, or those up to t when causal.
    """
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    out = []
    for b in range(batch):
        for t in range(queries):
            last = keys - queries + t + 1 if causal else keys
            order = torch.arange(keys) < last
            seen = order.clone() if key_mask is None else order & key_mask[b]
            if allowed is not None:
                seen = seen & allowed[min(b, allowed.shape[0] - 1), 0, t]
            count = max(int(seen.sum() if length == "true" else order.sum()), 1)
            products = (q[b, :, t, None] * k[b]).sum(-1) * seen
            out.append((products[..., None] * v[b]).sum(1) / math.sqrt(count))
    return torch.stack(out).view(batch, queries, heads, -1).transpose(1, 2)


def slow_belief_projection(heads: Tensor, values: Tensor, per_head: bool = False, eps: float = 1e-8) -> Tensor:
    """y - (<y, v> / max(<v, v>, eps)) v, token by token, over the joined heads or head by head; (B,L,H,D)."""
    y, v = (heads, values) if per_head else (heads.flatten(2), values.flatten(2))
    share = (y * v).sum(-1, keepdim=True) / (v * v).sum(-1, keepdim=True).clamp_min(eps)
    return (y - share * v).view_as(heads)


def slow_hopfield_scores(all_scores: list[Tensor], alpha_prime: float) -> Tensor:
    """H of the last layer as its own sum: sum over layers of alpha'^(distance) (1 - alpha') S (H_0 = 0)."""
    top = len(all_scores) - 1
    return sum((1 - alpha_prime) * alpha_prime ** (top - i) * s for i, s in enumerate(all_scores))  # type: ignore[return-value]  # not empty


def slow_hopfield_retrieve(state: Tensor, patterns: Tensor, beta: float, n: float = 1.0, steps: int = 1) -> Tensor:
    """xi <- sum_i p_i y_i with p = softmax_n(beta <y_i, xi>), for one state (D,) and patterns (N,D)."""
    for _ in range(steps):
        scores = torch.stack([beta * (pattern * state).sum() for pattern in patterns])
        weights = slow_softmax_n(scores[None], n)[0]
        state = sum(weight * pattern for weight, pattern in zip(weights, patterns, strict=True))  # type: ignore[assignment]  # tensors
    return state
