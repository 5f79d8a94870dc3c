"""Computes causal linear attention on CUDA by a kernel of the package flash-linear-attention, whose module is `fla`.

fla computes o_t = w q_t (S + sum_{i <= t} k_i v_i^T). Here w = 1, without fla's own normalization, and the factor
f_t = L_t^(-1/2) is applied afterwards. For one token, with S = 0 and f = 1, the result is q k^T v.
The kernel is used for bf16 alone: it rounds the factors of each product, in fp32 to TF32, and in fp16 the sums would
leave the range of numbers before f is applied.
Yang & Zhang, flash-linear-attention (2024); SimpleTRON (2021), section 3.
Axes: B batch, H head, Q query, D head width, N = B H.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functional.linear import Past, length_factor, masked_keys, per_head, state_before, without_autocast
from .double_backward import refuse_double_backward

ARGUMENTS = {"q", "k", "v", "scale", "initial_state", "output_final_state", "normalize"}
TOKENS_FIRST = {"head_first", "cu_seqlens"}  # versions with one of these arguments take tokens before heads


@functools.cache
def kernel() -> Callable[..., Any] | None:
    """The function `chunk_linear_attn` of fla, or None if fla is missing or has another form of this function."""
    try:
        function: Callable[..., Any] = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    except (ImportError, AttributeError):
        return None
    names = set(inspect.signature(function).parameters)
    return function if names >= ARGUMENTS and names & TOKENS_FIRST else None


def available(device: str, dtype: torch.dtype) -> bool:
    """True if the kernel is there for tensors of this dtype on this type of device."""
    return device == "cuda" and dtype == torch.bfloat16 and torch.version.hip is None and kernel() is not None


def attend(q: Tensor, k: Tensor, v: Tensor, *, key_mask: Tensor | None, length: str, past: Past | None) -> Tensor:
    """Compute `functional.simple_attention` in causal order, by fla's kernel: `Form.FLA`.

    The arguments, the result (B,H,Q,D) and the errors are those of `functional.simple_attention`. All three tensors
    have the same dtype.
    """
    run = kernel()
    assert run is not None
    factor_BQ = length_factor(q, k, causal=True, key_mask=key_mask, length=length, past=past)
    k = masked_keys(k, key_mask)
    behind = k.shape[2] - q.shape[2]
    with without_autocast(q.device):
        state = None
        if behind > 0 or past is not None:
            state = per_head(state_before(k, v, behind, past), q.shape[1]).flatten(0, 1).unsqueeze(1)
        # Each head is a sequence with one head, (N,Q,1,D): some versions of fla refuse more heads than tokens.
        sequences = [tensor.flatten(0, 1).unsqueeze(2) for tensor in (q, k[:, :, behind:], v[:, :, behind:])]
        mixed, _ = run(*sequences, scale=1.0, initial_state=state, output_final_state=False, normalize=False)
    if mixed.requires_grad:
        mixed.register_hook(lambda _: refuse_double_backward())  # before the backward pass of the kernel
    scaled: Tensor = mixed.reshape(q.shape) * factor_BQ[:, None, :, None]
    return scaled.to(q.dtype)
