"""Computes softmax_n attention, also with further pairs of a score and a value, from the log-sum-exp of fused kernels.

This form needs no further key, and so no copy of keys and values. If lse is the log-sum-exp of a row, softmax_n scales
the output of softmax by exp(lse - lse'), with lse' = log(n + exp(lse)). n = 0 is ordinary attention.
In the backward pass, the same kernel is given lse' and the scaled output O'. The kernel then computes
dS = P' (m dP - <dO, O'>) with P' = exp(S - lse'), which is the exact gradient of softmax_n: the zero key adds nothing
to <dO, O'>, because its value is 0. m is what dropout multiplies the weights by, and 1 without dropout.
Pairs of a score c_j and a value u_j, which every query sees, join in the same way: lse' = log(n + exp(lse) + sum_j
exp(c_j)), O' = exp(lse - lse') O + sum_j p_j u_j with p_j = exp(c_j - lse'), and dc_j = p_j (<dO, u_j> - <dO, O'>).
OutEffHop (Hu et al., 2024), eq. 2.11; FlashAttention-2, section 2.3.2, for the backward pass.
Axes: B batch, H head, G key/value head, Q query, K key, N pair, D head width.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.call import Three
from ..functional.linear import wide, without_autocast
from .double_backward import refuse_double_backward
from .stock_softmax import Kernel, KernelOutput, SdpaArgs, kernels


class Further(NamedTuple):
    """Pairs that every query sees: scores (B,H,Q,N) in fp32 at least; values (G,N,D), or None for zeros."""

    scores: Tensor
    values: Tensor | None


def softmax_n_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    n: float | Tensor,
    dropout: float = 0.0,
    further: Further | None = None,
) -> Tensor | None:
    """Compute dropout(softmax_n([c, scaling q k^T + mask])) [u; v], where c and u are further scores and values.

    Args:
        query: (B,H,Q,D).
        key: (B,G,K,D).
        value: (B,G,K,D).
        mask: finite numbers to add in the dtype of the query, (B|1,H|1,Q|1,K), or None. Half the lowest number of the
            dtype forbids a key, and a row in which every key is forbidden gives zeros.
        causal: as SDPA's flag. Not together with a mask.
        scaling: the factor of q k^T.
        n: a number, 0 for softmax, or a (1,) tensor without a gradient.
        dropout: the probability that a weight is dropped. Not together with `further`.
        further: pairs beside the keys, or None.

    Returns:
        The heads (B,H,Q,D), or None if no kernel can compute with these tensors.
    """
    if not _plain((query, key, value), mask):
        return None
    args = SdpaArgs(causal, scaling, dropout)
    for kernel in kernels(query.device.type, query.dtype, dropout > 0):
        qkv, ready_mask = kernel.prepared((query, key, value), mask)
        if kernel.takes(qkv, ready_mask, args):
            wider = qkv[0].shape[3] > query.shape[3]
            if further is not None and wider:
                missing = qkv[0].shape[3] - query.shape[3]
                further = further._replace(
                    values=None if further.values is None else F.pad(further.values, (0, missing))
                )
            arguments = (ready_mask, kernel, _log(n, query), args)
            if torch.is_grad_enabled():
                heads: Tensor = _SoftmaxN.apply(*qkv, *(further or (None, None)), *arguments)  # type: ignore[no-untyped-call]  # torch's
            else:
                heads = _scaled(qkv, further, *arguments)[0]
            return heads[..., : query.shape[3]] if wider else heads
    return None


def _plain(qkv: Three, mask: Tensor | None) -> bool:
    """True if a kernel may read these tensors.

    The kernels need rows that are contiguous in memory, equal widths of query, key and value, one dtype, and a mask
    without a gradient.
    """
    if mask is not None and (mask.requires_grad or mask.dim() != 4):
        return False
    query, key, value = qkv
    alike = query.dtype == key.dtype == value.dtype and query.shape[3] == key.shape[3] == value.shape[3]
    in_rows = query.stride(3) == key.stride(3) == value.stride(3) == 1
    return alike and in_rows and query.numel() > 0 and key.numel() > 0


def _log(n: float | Tensor, query: Tensor) -> float | Tensor:
    """The logarithm of n, in fp32 at least."""
    if isinstance(n, float):
        return math.log(n) if n > 0 else -math.inf
    return n.detach().to(wide(query)).log()


def _scaled(
    qkv: Three,
    further: Further | None,
    mask: Tensor | None,
    kernel: Kernel,
    log_n: float | Tensor,
    args: SdpaArgs,
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """The heads, the log-sum-exp of the keys, and what else the kernel's backward pass needs."""
    heads, lse, kept = kernel.forward(qkv, mask, args)
    queries = qkv[0].shape[2]
    lse_of_text = (lse if lse.shape[2] == queries else lse[:, :, :queries]).unsqueeze(-1)
    if further is None:
        above = lse_of_text if isinstance(log_n, float) and log_n == 0 else lse_of_text - log_n
        heads.mul_(torch.sigmoid(above))  # exp(lse - lse')
        return heads, lse, kept
    scores, values = further
    plain = isinstance(log_n, float) and log_n == -math.inf
    if plain and scores.shape[3] == 1 and heads.dtype == scores.dtype:  # fewer steps, for decoding
        share = torch.sigmoid(lse_of_text - scores)  # exp(lse - lse')
        if values is None:
            heads.mul_(share)
        else:
            grouped, grouped_share = _grouped(values, heads, share)
            torch.lerp(values.unsqueeze(1), grouped, grouped_share, out=grouped)
        return heads, lse, kept
    total = _joined(lse, scores, log_n)[:, :, :queries].unsqueeze(-1)
    heads.mul_((lse_of_text - total).exp_())
    if values is not None:
        weights = (scores - total).exp_().to(heads.dtype)
        grouped, weights = _grouped(values, heads, weights)
        grouped.add_(weights @ values.unsqueeze(1))
    return heads, lse, kept


def _grouped(values: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors (B,H,Q,...) as (B,G,H/G,Q,...), to meet the values (G,N,D) of the groups."""
    batch, heads, *rest = first.shape
    shape = batch, values.shape[0], heads // values.shape[0]
    return first.view(*shape, *rest), second.view(*shape, *second.shape[2:])


def _joined(lse: Tensor, scores: Tensor | None, log_n: float | Tensor) -> Tensor:
    """The number lse' from lse (B,H,Q or more), further scores (B,H,Q,N) or None, and log n."""
    if scores is not None:
        further_lse = scores[..., 0] if scores.shape[3] == 1 else scores.logsumexp(-1)
        if lse.shape[2] > further_lse.shape[2]:  # rows that the kernel added, with lse = inf
            further_lse = F.pad(further_lse, (0, lse.shape[2] - further_lse.shape[2]), value=-math.inf)
        lse = torch.logaddexp(lse, further_lse)
    if isinstance(log_n, float):
        if log_n == -math.inf:
            return lse
        log_n = lse.new_full((1,), log_n)
    return torch.logaddexp(lse, log_n)


class _SoftmaxN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        query, key, value, scores, values, mask, kernel, log_n, args = arguments
        further = None if scores is None else Further(scores, values)
        heads, lse, kept = _scaled((query, key, value), further, mask, kernel, log_n, args)
        ctx.save_for_backward(query, key, value, scores, values, mask, heads, lse)
        ctx.kernel, ctx.log_n, ctx.kept, ctx.args = kernel, log_n, kept, args
        return heads

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        refuse_double_backward()
        query, key, value, scores, values, mask, heads, lse = ctx.saved_tensors
        qkv, further = (query, key, value), None if scores is None else Further(scores, values)
        total = _joined(lse, scores, ctx.log_n)
        output = KernelOutput(heads, total, ctx.kept)
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        grads = ctx.kernel.backward(grad, qkv, mask, output, ctx.args)
        grads_of_further = (None, None) if further is None else _of_further(grad, further, heads, total)
        return (*grads, *grads_of_further, None, None, None, None)


def _of_further(grad: Tensor, further: Further, heads: Tensor, total: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients of further scores (B,H,Q,N) and values (G,N,D)."""
    scores, values = further
    wide = scores.dtype
    weights = (scores - total[:, :, : scores.shape[2]].unsqueeze(-1)).exp_()
    with without_autocast(grad.device):
        grad = grad.to(wide)
        mean = (grad * heads).sum(-1, keepdim=True)
        if values is None:
            return -weights * mean, None
        g, p = _grouped(values, grad, weights)
        of_weights = (g @ values.to(wide).unsqueeze(1).mT).view_as(weights)
        of_values = (p.mT @ g).sum((0, 2)).to(values.dtype)
        return weights * (of_weights - mean), of_values
