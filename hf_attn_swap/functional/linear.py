"""Computes attention without softmax, in time and memory that are linear in the length.

A_t = L_t^(-1/2) q_t sum_i k_i v_i^T, summed over the L_t keys that query t may see. For one key, A = q k^T v.
SimpleTRON (2021), section 3.
Axes: B batch, H head, Q query, K key, D head width, N chunk, C token of a chunk.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

# Tokens before the given keys: the sum of k^T v (B,H,D,D), or (B,G,D,D) if groups of heads share it; the number of real
# keys (B,); and the number of all keys (1,).
Past = tuple[Tensor, Tensor, Tensor]
CHUNK = 128  # the number of queries per chunk of the causal form; any number gives the same result


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
    """Compute SimpleTRON attention, A = L^(-1/2) q (k^T v), without softmax and without a factor 1/sqrt(D).

    Sums are computed in fp32 at least. The factor is applied before the result is rounded to the dtype of q.

    Args:
        q: (B,H,Q,D).
        k: (B,H,K,D).
        v: (B,H,K,D).
        causal: query t (from 0) sees the keys up to number K - Q + t, so that the last query sees the last key. L is
            counted for each query.
        key_mask: (B,K) bool, True where the key is a real token. None means that all keys are real tokens.
        length: "true" lets L be the number of real keys that the query may see (at least 1); "fixed" counts padding
            too.
        past: the sums over tokens before k and v, see `Past`; used only if `causal` is True.

    Returns:
        A (B,H,Q,D), in the dtype of q.

    Raises:
        ValueError: there are more queries than keys and `causal` is True, or `length` is unknown.

    Source: SimpleTRON (2021), section 3; the causal form and the true length are ours.
    """
    factor_BQ = length_factor(q, k, causal=causal, key_mask=key_mask, length=length, past=past)
    k = masked_keys(k, key_mask)
    queries, keys, values = (widened(tensor) for tensor in (q, k, v))
    with without_autocast(q.device):
        if causal:
            behind = keys.shape[2] - queries.shape[2]
            state = state_before(keys, values, behind, past)
            if not _is_zero(behind):
                keys, values = keys[:, :, behind:], values[:, :, behind:]
            mixed = causal_products(queries, keys, values, state)
            return mixed.mul_(factor_BQ[:, None, :, None].to(mixed.dtype)).to(q.dtype)
        state = keys.transpose(2, 3) @ values  # all queries have the same factor, so the smaller tensor takes it
        return (queries @ (state * factor_BQ[:, None, :, None].to(state.dtype))).to(q.dtype)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Inside, products keep the dtype of their factors: autocast would round them to half precision."""
    if under_autocast(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def under_autocast(device: str) -> bool:
    """True if autocast is on for this type of device."""
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def wide(tensor: Tensor) -> torch.dtype:
    """The dtype in which sums over `tensor` are computed: fp32 at least."""
    return torch.promote_types(tensor.dtype, torch.float32)


def widened(tensor: Tensor) -> Tensor:
    """The tensor in fp32 at least."""
    return tensor.to(wide(tensor))


def length_factor(
    q: Tensor, k: Tensor, *, causal: bool, key_mask: Tensor | None, length: str, past: Past | None
) -> Tensor:
    """The factor L^(-1/2) of each query, in fp32 at least. The arguments are those of `simple_attention`.

    Returns:
        (B,Q). Either axis has size 1 if all rows, or all queries, have the same factor.

    Raises:
        ValueError: as in `simple_attention`.
    """
    if length not in ("true", "fixed"):
        raise ValueError(f"length must be 'true' or 'fixed', got {length!r}.")
    queries, keys = q.shape[2], k.shape[2]
    if causal and queries > keys:
        raise ValueError(f"causal simple attention needs at least as many keys as queries, got {keys} < {queries}.")
    if key_mask is not None and length == "true":
        counted_BK = key_mask
    else:
        counted_BK = k.new_ones(1, keys, dtype=torch.bool)
    if causal:
        visible_BQ = counted_BK.cumsum(-1)[:, keys - queries :]
    else:
        visible_BQ = counted_BK.sum(-1, keepdim=True)
    if causal and past is not None:
        _, real_B, all_1 = past
        visible_BQ = visible_BQ + (real_B if length == "true" else all_1)[:, None]
    return visible_BQ.clamp_min(1).to(wide(q)).rsqrt()


def masked_keys(k: Tensor, key_mask: Tensor | None) -> Tensor:
    """The keys (B,H,K,D), with zeros at padding."""
    return k if key_mask is None else k.masked_fill(~key_mask[:, None, :, None], 0)


def state_before(k: Tensor, v: Tensor, behind: int, past: Past | None) -> Tensor:
    """The sum of k^T v over the first `behind` keys and over the tokens in `past`: (B,H,D,D), in fp32 at least.

    It is (B,G,D,D) if `behind` is 0 and groups of heads share the sum in `past`.
    """
    if _is_zero(behind):  # a slice of no keys would still cost the size of all keys, in the backward pass
        empty = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=wide(k))
        return empty if past is None else past[0].to(empty.dtype)
    state = widened(k[:, :, :behind]).transpose(2, 3) @ widened(v[:, :, :behind])
    return state if past is None else state + per_head(past[0].to(state.dtype), k.shape[1])


def _is_zero(length: int) -> bool:
    """True if this length is 0 in every call. While a program is recorded, a length is no int, and may change."""
    return isinstance(length, int) and length == 0


def per_head(state: Tensor, heads: int) -> Tensor:
    """The sum of each head: from (B,G,D,D) to (B,H,D,D)."""
    groups = state.shape[1]
    return state if groups == heads else state.repeat_interleave(heads // groups, 1)


def causal_products(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """q_t (state + sum_{i <= t} k_i v_i^T), one chunk after the other.

    The cost is quadratic inside a chunk. Between chunks, the sum over all earlier tokens is carried on. A program that
    is recorded for any length has one chunk.
    """
    batch, heads, queries, width = q.shape
    if (
        not isinstance(queries, int) or queries <= CHUNK
    ):  # in a recorded program, a single chunk is right for any number
        read = (
            q.reshape(batch, state.shape[1], -1, width) @ state
        )  # the heads of a group share a state: no copies of it
        return read.view(batch, heads, queries, -1) + (q @ k.transpose(2, 3)).tril() @ v
    state = per_head(state, heads)
    q_BHNCD, k_BHNCD, v_BHNCD = (_chunks(tensor) for tensor in (q, k, v))
    sums = k_BHNCD.transpose(3, 4) @ v_BHNCD
    before = torch.cat([state.unsqueeze(2), sums[:, :, :-1]], 2).cumsum(2)
    inside = (q_BHNCD @ k_BHNCD.transpose(3, 4)).tril() @ v_BHNCD
    return (q_BHNCD @ before + inside).flatten(2, 3)[:, :, :queries]


def _chunks(tensor_BHQD: Tensor) -> Tensor:
    """Cut (B,H,Q,D) into chunks (B,H,N,C,D). The last chunk is filled up with zeros."""
    padded = pad(tensor_BHQD, (0, 0, 0, -tensor_BHQD.shape[2] % CHUNK))
    return padded.view(*padded.shape[:2], -1, CHUNK, padded.shape[3])
