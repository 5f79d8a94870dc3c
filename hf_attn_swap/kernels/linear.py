"""Causal linear attention on the CPU, a block at a time: out_t = q_t (S + sum_{i <= t} k_i v_i^T).

A block of queries, keys and values and the running state stay in the cache, and nothing of size L x D is held beside
the inputs and the result, backwards either. Elsewhere many small products in turn are slow: see `functional.linear`.
Without blocks, S = 0 and L = 1 it is q k^T v. SimpleTRON (2021), section 3; Katharopoulos et al. (2020) for the state.
Axes: B batch, H head, L token, D head width, N = B H.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, library

BLOCK = 64  # tokens; any value gives the same result


@library.custom_op("hf_attn_swap::causal_linear", mutates_args=(), device_types="cpu")
def causal_linear(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    """(B,H,L,D) from q, k, v (B,H,L,D) and what came before, (B,H,D,D); sums in fp32 at least.

    Source: SimpleTRON (2021), section 3, made causal.
    """
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    with torch.autocast("cpu", enabled=False):
        flat, running = out.flatten(0, 1), _wide(state).flatten(0, 1).clone()
        for part, a, b, c in _blocks(q, k, v):
            own = torch.bmm(torch.bmm(a, b.transpose(1, 2)).tril_(), c)
            flat[:, part] = own.baddbmm_(a, running)
            running.baddbmm_(b.transpose(1, 2), c)
    return out


@causal_linear.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> Tensor:
    return torch.empty_like(v, memory_format=torch.contiguous_format)


@library.custom_op("hf_attn_swap::causal_linear_backward", mutates_args=(), device_types="cpu")
def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v)]
    grad_q, grad_k, grad_v = (t.flatten(0, 1) for t in grads)
    with torch.autocast("cpu", enabled=False):
        running = _wide(state).flatten(0, 1).clone()
        for part, _, b, c, g in _blocks(q, k, v, grad):
            own = torch.bmm(torch.bmm(g, c.transpose(1, 2)).tril_(), b)
            grad_q[:, part] = own.baddbmm_(g, running.transpose(1, 2))
            running.baddbmm_(b.transpose(1, 2), c)
        later = torch.zeros_like(running)  # sum of q g^T over the queries behind the block
        for part, a, b, c, g in reversed(list(_blocks(q, k, v, grad))):
            weights, pairs = torch.bmm(a, b.transpose(1, 2)).tril_(), torch.bmm(g, c.transpose(1, 2)).tril_()
            grad_v[:, part] = torch.bmm(weights.transpose(1, 2), g).baddbmm_(b, later)
            grad_k[:, part] = torch.bmm(pairs.transpose(1, 2), a).baddbmm_(c, later.transpose(1, 2))
            later.baddbmm_(a.transpose(1, 2), g)
    return grads[0], grads[1], grads[2], later.view(state.shape).to(state.dtype)


@_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (q, k, v, state)]
    return made[0], made[1], made[2], made[3]


def _blocks(*tensors: Tensor) -> Iterator[tuple[Any, ...]]:
    """The slice of each block, and the block of each tensor as (N,block,D), wide."""
    flat = [tensor.flatten(0, 1) for tensor in tensors]
    for start in range(0, flat[0].shape[1], BLOCK):
        part = slice(start, start + BLOCK)
        yield part, *(_wide(tensor[:, part]) for tensor in flat)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = _backward(grad, *ctx.saved_tensors)
    return found


causal_linear.register_autograd(_gradients, setup_context=_save)
