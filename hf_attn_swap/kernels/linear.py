"""Computes causal linear attention on the CPU, one block of tokens after the other.

The formula is f_t q_t (S + sum_{i <= t} k_i v_i^T) with f_t = L_t^(-1/2). For one token, with S = 0 and f = 1, the
result is q k^T v.
One block of queries, keys and values fits into the processor's cache, together with the sum over all earlier tokens.
Beside the inputs and the result, the forward and the backward pass hold no tensor of size L x D. On other devices,
many small products in turn are slow, so the chunks of `functional.linear` run there.
SimpleTRON (2021), section 3; Katharopoulos et al. (2020) for the state.
Axes: B batch, H head, L token, D head width, N = B H.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, library

from ..functional.linear import Past, length_factor, masked_keys, state_before, without_autocast

BLOCK = 64  # the number of tokens in a block; any number gives the same result


def available(device: str) -> bool:
    """True if the operator runs on this type of device."""
    return device == "cpu"


def attend(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, length: str, past: Past | None) -> Tensor:
    """Compute `functional.simple_attention` in causal order, by the operator of this file: `Form.BLOCKS`.

    The arguments, the result (B,H,Q,D) and the errors are those of `functional.simple_attention`. All three tensors
    have the same dtype.
    """
    factor_BQ = length_factor(q, k, causal=True, key_mask=key_mask, length=length, past=past)
    k = masked_keys(k, key_mask)
    behind = k.shape[2] - q.shape[2]
    with without_autocast(q.device):
        state = state_before(k, v, behind, past)
    return torch.as_tensor(causal_linear(q, k[:, :, behind:], v[:, :, behind:], state, factor_BQ))


@library.custom_op("hf_attn_swap::causal_linear", mutates_args=(), device_types="cpu")
def causal_linear(q: Tensor, k: Tensor, v: Tensor, state: Tensor, factor: Tensor) -> Tensor:
    """Compute causal linear attention. Sums are computed in fp32 at least.

    Args:
        q: (B,H,L,D).
        k: (B,H,L,D).
        v: (B,H,L,D).
        state: S, the sum of k v^T over earlier tokens (B,H,D,D).
        factor: f (B|1,L).

    Returns:
        (B,H,L,D), in the dtype of v.

    Source: SimpleTRON (2021), section 3, made causal.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    with torch.autocast("cpu", enabled=False):
        flat = out.flatten(0, 1)
        running = _wide(state).flatten(0, 1).clone()
        factors = _per_row(factor, q)
        for part, a, b, c in _blocks(q, k, v):
            own = torch.bmm(torch.bmm(a, b.transpose(1, 2)).tril_(), c)
            flat[:, part] = own.baddbmm_(a, running).mul_(factors[:, part])
            running.baddbmm_(b.transpose(1, 2), c)
    return out


@causal_linear.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, state: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@library.custom_op("hf_attn_swap::causal_linear_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    grad_q, grad_k, grad_v = (t.flatten(0, 1) for t in grads)
    with torch.autocast("cpu", enabled=False):
        running = _wide(state).flatten(0, 1).clone()
        factors = _per_row(factor, q)
        for part, _, b, c, g in _blocks(q, k, v, grad):
            g = g * factors[:, part]
            own = torch.bmm(torch.bmm(g, c.transpose(1, 2)).tril_(), b)
            grad_q[:, part] = own.baddbmm_(g, running.transpose(1, 2))
            running.baddbmm_(b.transpose(1, 2), c)
        later = torch.zeros_like(running)  # the sum of q g^T over the queries after the block
        for part, a, b, c, g in reversed(list(_blocks(q, k, v, grad))):
            g = g * factors[:, part]
            weights = torch.bmm(a, b.transpose(1, 2)).tril_()
            pairs = torch.bmm(g, c.transpose(1, 2)).tril_()
            grad_v[:, part] = torch.bmm(weights.transpose(1, 2), g).baddbmm_(b, later)
            grad_k[:, part] = torch.bmm(pairs.transpose(1, 2), a).baddbmm_(c, later.transpose(1, 2))
            later.baddbmm_(a.transpose(1, 2), g)
    return grads[0], grads[1], grads[2], later.view(state.shape).to(state.dtype)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor, factor: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, state)]
    return made[0], made[1], made[2], made[3]


def _blocks(*tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """For each block: its slice of the tokens, and its part of each tensor as (N,block,D), in fp32 at least."""
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    for start in range(0, flat[0].shape[1], BLOCK):
        part = slice(start, start + BLOCK)
        yield part, *(_wide(tensor[:, part]) for tensor in flat)


def _per_row(factor_BL: Tensor, like_BHLD: Tensor) -> Tensor:
    """The factors as (N,L,1), in fp32 at least."""
    batch, heads, length = like_BHLD.shape[:3]
    return _wide(factor_BL).expand(batch, length).repeat_interleave(heads, 0).unsqueeze(-1)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in fp32 at least."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors), None)


causal_linear.register_autograd(_gradients, setup_context=_save)
