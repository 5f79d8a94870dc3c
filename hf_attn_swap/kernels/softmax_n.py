"""Computes softmax_n attention from the log-sum-exp of PyTorch's fused CPU kernel.

This form needs no zero key, and so no copy of keys and values. If lse is the log-sum-exp of a row, softmax_n scales
the output of softmax by exp(lse - lse'), with lse' = log(n + exp(lse)). n = 0 is ordinary attention.
In the backward pass, the same kernel is given lse' and the scaled output O'. The kernel then computes
dS = P' (dP - <dO, O'>) with P' = exp(S - lse'), which is the exact gradient of softmax_n: the zero key adds nothing to
<dO, O'>, because its value is 0.
OutEffHop (Hu et al., 2024), eq. 2.2; FlashAttention-2, section 2.3.2, for the backward pass.
Axes: B batch, H head, G key/value head, Q query, K key, D head width.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
GROUPED = torch.__version__ >= "2.13"  # the first version with which shared key/value heads are tested
_OPERATORS = torch.ops.aten
FORWARD = getattr(_OPERATORS, "_scaled_dot_product_flash_attention_for_cpu", None)
BACKWARD = getattr(_OPERATORS, "_scaled_dot_product_flash_attention_for_cpu_backward", None)


def available(device: str, dtype: torch.dtype) -> bool:
    """True if this version of PyTorch has the kernel for tensors of this dtype on this type of device."""
    switched_on: bool = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]  # the switch of sdpa_kernel(...), CPU too
    return FORWARD is not None and BACKWARD is not None and device == "cpu" and dtype in DTYPES and switched_on


def fits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """True if the kernel can compute with these tensors.

    The kernel needs rows that are contiguous in memory, equal widths of query, key and value, one dtype, and a mask
    without a gradient.
    """
    if torch.compiler.is_compiling():  # the checks below would break the graph
        return False
    if not available(query.device.type, query.dtype) or not (GROUPED or query.shape[1] == key.shape[1]):
        return False
    if mask is not None and (mask.requires_grad or mask.dim() != 4):
        return False
    same_width = key.shape[3] == value.shape[3] == query.shape[3]
    return same_width and all(
        each.device.type == "cpu" and each.dtype == query.dtype and each.stride(-1) == 1 and each.numel() > 0
        for each in (query, key, value)
    )


def softmax_n_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scaling: float, n: float | Tensor
) -> Tensor:
    """Compute softmax_n(scaling q k^T + mask) v.

    Args:
        query: (B,H,Q,D).
        key: (B,G,K,D).
        value: (B,G,K,D).
        mask: finite numbers to add in the dtype of the query, (B|1,H|1,Q|1,K), or None. The dtype's minimum forbids a
            key, and a row in which every key is forbidden gives zeros.
        causal: as SDPA's flag. Not together with a mask.
        scaling: the factor of q k^T.
        n: a number above 0, or a (1,) tensor without a gradient.

    Returns:
        The heads (B,H,Q,D).
    """
    if mask is not None:
        mask = mask.expand(-1, -1, query.shape[2], -1)
    log_n: float | Tensor
    if isinstance(n, float):
        log_n = math.log(n)
    else:
        log_n = n.detach().to(torch.promote_types(query.dtype, torch.float32)).log()
    if not torch.is_grad_enabled():
        return _scaled(query, key, value, mask, causal, scaling, log_n)[0]
    heads: Tensor = _SoftmaxN.apply(query, key, value, mask, causal, scaling, log_n)  # type: ignore[no-untyped-call]  # torch's
    return heads


def _scaled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float,
    log_n: float | Tensor,
) -> tuple[Tensor, Tensor]:
    """The heads of softmax_n, and the log-sum-exp of softmax."""
    heads, lse = FORWARD(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)  # type: ignore[misc]  # there
    heads.mul_(torch.sigmoid(lse - log_n).unsqueeze(-1))  # exp(lse - lse')
    return heads, lse


class _SoftmaxN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        query, key, value, mask, causal, scaling, log_n = given
        heads, lse = _scaled(*given)
        ctx.save_for_backward(query, key, value, mask, heads, lse)
        ctx.causal, ctx.scaling, ctx.log_n = causal, scaling, log_n
        return heads

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        query, key, value, mask, heads, lse = ctx.saved_tensors
        log_n = ctx.log_n if isinstance(ctx.log_n, Tensor) else lse.new_tensor(ctx.log_n)
        wider = torch.logaddexp(lse, log_n)
        kept = {"attn_mask": mask, "scale": ctx.scaling}
        grads = BACKWARD(grad, query, key, value, heads, wider, 0.0, ctx.causal, **kept)  # type: ignore[misc]  # there
        return (*grads, None, None, None, None)
