"""Computes softmax_n attention from the log-sum-exp of PyTorch's fused kernels.

This form needs no zero key, and so no copy of keys and values. If lse is the log-sum-exp of a row, softmax_n scales
the output of softmax by exp(lse - lse'), with lse' = log(n + exp(lse)). n = 0 is ordinary attention.
In the backward pass, the same kernel is given lse' and the scaled output O'. The kernel then computes
dS = P' (m dP - <dO, O'>) with P' = exp(S - lse'), which is the exact gradient of softmax_n: the zero key adds nothing
to <dO, O'>, because its value is 0. m is what dropout multiplies the weights by, and 1 without dropout.
OutEffHop (Hu et al., 2024), eq. 2.2; FlashAttention-2, section 2.3.2, for the backward pass.
Axes: B batch, H head, G key/value head, Q query, K key, D head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .. import functional
from ..core.call import Three
from ..functional.linear import without_autocast
from . import twice
from .stock_softmax import Found, How, Kernel, kernels


def available(device: str, dtype: torch.dtype, dropout: bool) -> bool:
    """True if this version of PyTorch has a kernel for tensors of this dtype on this type of device."""
    return bool(kernels(device, dtype, dropout))


def softmax_n_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    n: float | Tensor,
    dropout: float = 0.0,
) -> Tensor | None:
    """Compute dropout(softmax_n(scaling q k^T + mask)) v.

    Args:
        query: (B,H,Q,D).
        key: (B,G,K,D).
        value: (B,G,K,D).
        mask: finite numbers to add in the dtype of the query, (B|1,H|1,Q|1,K), or None. Half the lowest number of the
            dtype forbids a key, and a row in which every key is forbidden gives zeros.
        causal: as SDPA's flag. Not together with a mask.
        scaling: the factor of q k^T.
        n: a number above 0, or a (1,) tensor without a gradient.
        dropout: the probability that a weight is dropped.

    Returns:
        The heads (B,H,Q,D), or None if no kernel can compute with these tensors.
    """
    if not _plain((query, key, value), mask):
        return None
    how = How(causal, scaling, dropout)
    for kernel in kernels(query.device.type, query.dtype, dropout > 0):
        qkv, ready_mask = kernel.prepared((query, key, value), mask)
        if kernel.takes(qkv, ready_mask, how):
            given = (ready_mask, kernel, _log(n, query), how)
            if torch.is_grad_enabled():
                heads: Tensor = _SoftmaxN.apply(*qkv, *given)  # type: ignore[no-untyped-call]  # torch's
            else:
                heads = _scaled(qkv, *given)[0]
            return heads[..., : query.shape[3]]
    return None


def _plain(qkv: Three, mask: Tensor | None) -> bool:
    """True if a kernel may read these tensors.

    The kernels need rows that are contiguous in memory, equal widths of query, key and value, one dtype, and a mask
    without a gradient.
    """
    if torch.compiler.is_compiling():  # the checks below would break the graph
        return False
    if mask is not None and (mask.requires_grad or mask.dim() != 4):
        return False
    query = qkv[0]
    return all(
        each.device == query.device
        and each.dtype == query.dtype
        and each.shape[3] == query.shape[3]
        and each.stride(-1) == 1
        and each.numel() > 0
        for each in qkv
    )


def _log(n: float | Tensor, query: Tensor) -> float | Tensor:
    """The logarithm of n, in fp32 at least."""
    if isinstance(n, float):
        return math.log(n)
    return n.detach().to(torch.promote_types(query.dtype, torch.float32)).log()


def _scaled(
    qkv: Three, mask: Tensor | None, kernel: Kernel, log_n: float | Tensor, how: How
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """The heads of softmax_n, the log-sum-exp of softmax, and what else the kernel's backward pass needs."""
    heads, lse, kept = kernel.forward(qkv, mask, how)
    heads.mul_(torch.sigmoid(lse[:, :, : qkv[0].shape[2]] - log_n).unsqueeze(-1))  # exp(lse - lse')
    return heads, lse, kept


class _SoftmaxN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        query, key, value, mask, kernel, log_n, how = given
        heads, lse, kept = _scaled((query, key, value), mask, kernel, log_n, how)
        ctx.save_for_backward(query, key, value, mask, heads, lse)
        ctx.kernel, ctx.log_n, ctx.kept, ctx.how = kernel, log_n, kept, how
        return heads

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, mask, heads, lse = ctx.saved_tensors
        if twice.wanted():
            return (*_again((query, key, value), mask, ctx.log_n, ctx.how, grad), None, None, None, None)
        log_n = ctx.log_n if isinstance(ctx.log_n, Tensor) else lse.new_full((1,), ctx.log_n)
        found = Found(heads, torch.logaddexp(lse, log_n), ctx.kept)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grads = ctx.kernel.backward(grad, (query, key, value), mask, found, ctx.how)
        return (*grads, None, None, None, None)


def _again(qkv: Three, mask: Tensor | None, log_n: float | Tensor, how: How, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of query, key and value by the readable formula, for second derivatives. It holds all weights.

    Raises:
        ValueError: weights were dropped. The kernel alone knows which.
    """
    if how.dropout > 0:
        twice.refuse(
            "softmax_n with dropout of weights", "call model.eval(), or set the config's attention dropout to 0"
        )

    def heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        wide = torch.promote_types(query.dtype, torch.float32)
        q, k, v = query.to(wide), key.to(wide), value.to(wide)
        scores = how.scaling * q @ k.repeat_interleave(groups, 1).mT
        if mask is not None:
            scores = scores + mask
        if how.causal:
            later = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).triu(1)
            scores = scores.masked_fill(later, torch.finfo(wide).min)
        n = log_n.exp() if isinstance(log_n, Tensor) else math.exp(log_n)
        return (functional.softmax_n(scores, n) @ v.repeat_interleave(groups, 1)).to(query.dtype)

    with without_autocast(grad.device):
        return twice.gradients(heads, qkv, grad)
