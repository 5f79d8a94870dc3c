"""Attention without softmax, linear in length. Axes: B batch, H head, Q query, K key, D head width, N chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.linear import causal_linear

Past = tuple[Tensor, Tensor, Tensor]  # what came before the keys: sum k^T v (B,H,D,D), real keys (B,), all keys (1,)
CHUNK = 128  # queries per block of the causal form; any value gives the same result


def simple_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    key_mask: Tensor | None = None,
    length: str = "true",
    past: Past | None = None,
) -> Tensor:
    """SimpleTRON attention, linear in length: A = L^(-1/2) q (k^T v), no softmax and no 1/sqrt(D).

    Args:
        q: (B,H,Q,D).
        k: (B,H,K,D).
        v: (B,H,K,D).
        causal: query t sees the keys up to K - Q + t (aligned to the bottom right) and L is counted per query.
        key_mask: (B,K) bool, True where the key is a real token; None means all are.
        length: "true" counts the real keys that the query may see (at least 1), "fixed" counts padding too.
        past: with `causal`, what came before k and v, see `Past`.

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
        if past is not None:
            state_BHDD, real_B, all_1 = past
            visible_BQ = visible_BQ + (real_B if length == "true" else all_1)[:, None]
            mixed = mixed + (q.to(state_BHDD.dtype) @ state_BHDD).to(mixed.dtype)
    return mixed.mul_(visible_BQ.clamp_min(1).to(mixed.dtype).rsqrt()[:, None, :, None])


def _causal_linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q_t sum_{i <= t + K - Q} k_i v_i^T in blocks: quadratic inside a block, a running state between them."""
    queries, past = q.shape[2], k.shape[2] - q.shape[2]
    state = k[:, :, :past].transpose(2, 3) @ v[:, :, :past]
    k, v = k[:, :, past:], v[:, :, past:]
    if queries > CHUNK and q.device.type == "cpu" and q.dtype == k.dtype == v.dtype:
        return torch.as_tensor(causal_linear(q, k, v, state))
    if queries <= CHUNK:
        return q @ state + (q @ k.transpose(2, 3)).tril() @ v
    pad = -queries % CHUNK
    padded = (torch.nn.functional.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
    q_BHNCD, k_BHNCD, v_BHNCD = (t.view(*t.shape[:2], -1, CHUNK, t.shape[3]) for t in padded)
    sums = k_BHNCD.transpose(3, 4) @ v_BHNCD
    before = sums.cumsum(2) - sums + state.unsqueeze(2)
    inside = (q_BHNCD @ k_BHNCD.transpose(3, 4)).tril() @ v_BHNCD
    return (q_BHNCD @ before + inside).flatten(2, 3)[:, :, :queries]
