"""Computes causal linear attention on the CPU, one block of tokens after the other.

The heads are f_t q_t (S + sum_{i <= t} k_i v_i^T) with f_t = L_t^(-1/2). For one token, with S = 0 and f = 1, the
result is q k^T v.
One block of queries, keys and values fits into the processor's cache, together with the sum over all earlier tokens.
Only a block is converted to fp32 at a time, and the tensors are read where they lie: no pass makes a copy of the size
L x D beside its results.
The backward pass goes through the tokens once, from the last to the first. It needs the sum before each block.
The forward pass keeps the sum before every span of `SPAN` blocks, and the backward pass makes the other sums of one
span again. To subtract blocks from the last sum would be shorter, but a large block would cancel the sums before it.
SimpleTRON (2021), section 3; Katharopoulos et al. (2020) for the state.
Axes: B batch, H head, L token, Q query, K key, D head width, N = B H, C token of a block, S span.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, library

from ..functional.linear import (
    Past,
    length_factor,
    masked_keys,
    per_head,
    state_before,
    wide,
    widened,
    without_autocast,
)
from .double_backward import refuse_double_backward

# Any of these numbers gives the same result.
BLOCK = 64  # the number of tokens in a block
SPAN = 16  # the number of blocks between two sums that the forward pass keeps


def attend(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, length: str, past: Past | None) -> Tensor:
    """Compute `functional.simple_attention` in causal order, by the operator of this file: `Form.BLOCKS`.

    The arguments, the result (B,H,Q,D) and the errors are those of `functional.simple_attention`. All three tensors
    have the same dtype.
    """
    factor = length_factor(q, k, causal=True, key_mask=key_mask, length=length, past=past)
    k = masked_keys(k, key_mask)
    behind = k.shape[2] - q.shape[2]
    with without_autocast(q.device):
        state = per_head(state_before(k, v, behind, past), q.shape[1])
    if behind:  # otherwise the gradient of the slice would be one more copy
        k, v = k[:, :, behind:], v[:, :, behind:]
    return torch.as_tensor(causal_linear(q, k, v, state, factor)[0])


@library.custom_op("hf_attn_swap::causal_linear", mutates_args=(), device_types="cpu")
def causal_linear(q: Tensor, k: Tensor, v: Tensor, state: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Compute causal linear attention. Sums are computed in fp32 at least.

    Args:
        q: (B,H,L,D).
        k: (B,H,L,D).
        v: (B,H,L,D).
        state: S, the sum of k v^T over earlier tokens (B,H,D,D).
        factor: f (B|1,L).

    Returns:
        The heads (B,H,L,D), in the dtype of v; in memory the order is (B,L,H,D), in which W_o reads heads. And the sum
        before each span (S,N,D,D), for the backward pass.

    Source: SimpleTRON (2021), section 3, made causal.
    """
    out, kept = _heads(q, v), _kept(q, state)
    with torch.autocast("cpu", enabled=False):
        running = widened(state).flatten(0, 1).clone()
        factors = _per_row(factor, q)
        for place, tokens in enumerate(_blocks(q)):
            if place % SPAN == 0:
                kept[place // SPAN] = running
            a, b, c = _block(q, tokens) * factors[:, tokens], _block(k, tokens), _block(v, tokens)
            inside = torch.bmm(torch.bmm(a, b.mT).tril_(), c)
            _put(out, tokens, inside.baddbmm_(a, running))
            running.baddbmm_(b.mT, c)
    return out, kept


@causal_linear.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, state: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    return _heads(q, v), _kept(q, state)


@library.custom_op("hf_attn_swap::causal_linear_backward", mutates_args=(), device_types="cpu")
def _causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, factor: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (torch.empty_like(tensor) for tensor in (q, k, v))
    with torch.autocast("cpu", enabled=False):
        factors = _per_row(factor, q)
        later = torch.zeros_like(kept[0])  # the sum of f q g^T over the queries after the block
        before = kept.new_empty(SPAN, *later.shape)  # the sum before each block of a span
        blocks = list(_blocks(q))
        for number, start in reversed(list(enumerate(range(0, len(blocks), SPAN)))):
            span = blocks[start : start + SPAN]
            before[0] = kept[number]
            for place, tokens in enumerate(span[:-1]):
                torch.baddbmm(before[place], _block(k, tokens).mT, _block(v, tokens), out=before[place + 1])
            for place, tokens in reversed(list(enumerate(span))):
                a, b, c = _block(q, tokens) * factors[:, tokens], _block(k, tokens), _block(v, tokens)
                g = _block(grad, tokens)
                weights = torch.bmm(a, b.mT).tril_()
                grad_weights = torch.bmm(g, c.mT).tril_()
                grad_a = torch.bmm(grad_weights, b).baddbmm_(g, before[place].mT)
                _put(grad_q, tokens, grad_a.mul_(factors[:, tokens]))
                _put(grad_k, tokens, torch.bmm(grad_weights.mT, a).baddbmm_(c, later.mT))
                _put(grad_v, tokens, torch.bmm(weights.mT, g).baddbmm_(b, later))
                later.baddbmm_(a.mT, g)
    return grad_q, grad_k, grad_v, later.reshape(*q.shape[:2], *later.shape[1:])


@_causal_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, factor: Tensor, kept: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_q, grad_k, grad_v = (torch.empty_like(tensor) for tensor in (q, k, v))
    return grad_q, grad_k, grad_v, kept.new_empty(*q.shape[:2], *kept.shape[2:])


def _heads(q: Tensor, v: Tensor) -> Tensor:
    """An empty result (B,H,Q,D), which lies in memory as (B,Q,H,D)."""
    batch, heads, queries, _ = q.shape
    return v.new_empty(batch, queries, heads, v.shape[3]).transpose(1, 2)


def _kept(q: Tensor, state: Tensor) -> Tensor:
    """An empty tensor for the sum before each span (S,N,D,D), in fp32 at least."""
    batch, heads, length, _ = q.shape
    spans = -(-length // (BLOCK * SPAN))
    return state.new_empty(spans, batch * heads, *state.shape[2:], dtype=wide(state))


def _blocks(tensor: Tensor) -> Iterator[slice]:
    """The blocks of the tokens of a tensor (B,H,L,D), each of `BLOCK` tokens; the last may be shorter."""
    for start in range(0, tensor.shape[2], BLOCK):
        yield slice(start, start + BLOCK)


def _block(tensor: Tensor, tokens: slice) -> Tensor:
    """A block of a tensor (B,H,L,D) as (N,C,D), in fp32 at least. It may share memory with the tensor."""
    return widened(tensor[:, :, tokens].flatten(0, 1))


def _put(tensor: Tensor, tokens: slice, block: Tensor) -> None:
    """Write a block (N,C,D) into a tensor (B,H,L,D)."""
    tensor[:, :, tokens] = block.reshape(*tensor.shape[:2], *block.shape[1:])


def _per_row(factor_BL: Tensor, like_BHLD: Tensor) -> Tensor:
    """The factors as (N,L,1), in fp32 at least."""
    batch, heads, length = like_BHLD.shape[:3]
    return widened(factor_BL).expand(batch, length).repeat_interleave(heads, 0).unsqueeze(-1)


def _save_causal(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, state, factor = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, factor, output[1])
    ctx.state_dtype = state.dtype


def _causal_gradients(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    refuse_double_backward()
    *grads, grad_state = _causal_backward(grad, *ctx.saved_tensors)
    return (*grads, grad_state.to(ctx.state_dtype), None)


causal_linear.register_autograd(_causal_gradients, setup_context=_save_causal)
