"""Calls PyTorch's fused kernels of ordinary attention, so that they also give the log-sum-exp of each row.

heads = dropout(softmax(S)) v with S = w q k^T + M, and lse = log sum_k exp(S), by the natural logarithm.
There are three kernels: one for the CPU, and for CUDA the flash kernel (half precision, no mask of numbers) and the
memory-efficient one. A kernel is used only if its operators take the arguments that this file gives them, and if
PyTorch itself would run it for these tensors.
FlashAttention-2 (Dao, 2023); Rabe & Staats (2021) for the memory-efficient kernel.
Axes: B batch, H head, G key/value head, Q query, K key, D head width, W the width after padding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends import cuda

from ..core.call import Three

HALF = (torch.bfloat16, torch.float16)
GROUPED = torch.__version__ >= "2.13"  # the first version with which the CPU kernel's shared heads are tested
ALIGNED = 8  # CUDA kernels read so many numbers at once: widths and rows of masks are filled up to a multiple of it


class Operators(NamedTuple):
    """The operators of the forward and the backward pass of one kernel."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]


def operators(name: str, forward: str, backward: str) -> Operators | None:
    """The operators `name` and `name`_backward of this version of PyTorch.

    Args:
        name: the operator's name.
        forward: the names of the arguments that the operator must have, in this order.
        backward: the same for the operator of the backward pass.

    Returns:
        The operators, or None if one of them is missing or has other arguments.
    """
    both = []
    for operator_name, arguments in ((name, forward), (f"{name}_backward", backward)):
        operator = getattr(torch.ops.aten, operator_name, None)
        if operator is None or [argument.name for argument in operator.default._schema.arguments] != arguments.split():
            return None
        both.append(getattr(torch, operator_name, operator))  # the same operator, called by less Python
    return Operators(*both)


class SdpaArgs(NamedTuple):
    """What is computed: S in causal order, w, and the probability that a weight is dropped."""

    causal: bool
    scaling: float
    dropout: float


class KernelOutput(NamedTuple):
    """The heads (B,H,Q,W), lse (B,H,Q or more), and what else the kernel's backward pass needs."""

    heads: Tensor
    lse: Tensor
    kept: tuple[Any, ...]


class Cpu:
    """The flash kernel of the CPU. Each kernel has the same attributes, and methods with the same arguments.

    Attributes:
        device: the type of the device on which the kernel runs.
        dtypes: the dtypes of query, key and value that the kernel takes.
        drops: True if the kernel can drop weights.
        operators: the operators of PyTorch, or None if this version has others.
        on: True if the user has not switched the kernel off, for example by `torch.nn.attention.sdpa_kernel`.
    """

    device = "cpu"
    dtypes = (torch.float64, torch.float32, *HALF)
    drops = False
    operators: Any = operators(
        "_scaled_dot_product_flash_attention_for_cpu",
        "query key value dropout_p is_causal attn_mask scale",
        "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale",
    )
    on = staticmethod(cuda.flash_sdp_enabled)  # the switch of sdpa_kernel(...), CPU too

    def prepared(self, qkv: Three, mask: Tensor | None) -> tuple[Three, Tensor | None]:
        """Query, key and value (B,H,·,W), and the mask, as the kernel takes them. Gradients flow through this step."""
        return qkv, None if mask is None else mask.expand(-1, -1, qkv[0].shape[2], -1)

    def takes(self, qkv: Three, mask: Tensor | None, args: SdpaArgs) -> bool:
        """True if the kernel can compute with these prepared tensors."""
        query, key, _ = qkv
        return GROUPED or query.shape[1] == key.shape[1]

    def forward(self, qkv: Three, mask: Tensor | None, args: SdpaArgs) -> KernelOutput:
        """Compute the heads and lse from prepared tensors."""
        heads, lse = self.operators.forward(*qkv, 0.0, args.causal, attn_mask=mask, scale=args.scaling)
        return KernelOutput(heads, lse, ())

    def backward(self, grad: Tensor, qkv: Three, mask: Tensor | None, output: KernelOutput, args: SdpaArgs) -> Three:
        """The gradients of query, key and value from `grad`, the gradient of the heads (B,H,Q,W)."""
        arguments = (grad, *qkv, output.heads, output.lse, 0.0, args.causal)
        grads: Three = self.operators.backward(*arguments, attn_mask=mask, scale=args.scaling)
        return grads


class Flash:
    """The flash kernel of CUDA. It reads the keys of a group without a copy."""

    device = "cuda"
    dtypes = HALF
    drops = True
    operators: Any = operators(
        "_scaled_dot_product_flash_attention",
        "query key value dropout_p is_causal return_debug_mask scale",
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal philox_seed "
        "philox_offset scale",
    )
    on = staticmethod(cuda.flash_sdp_enabled)

    def prepared(self, qkv: Three, mask: Tensor | None) -> tuple[Three, Tensor | None]:
        return _padded(qkv), mask

    def takes(self, qkv: Three, mask: Tensor | None, args: SdpaArgs) -> bool:
        query, key, _ = qkv
        if mask is not None or (args.causal and query.shape[2] != key.shape[2]):
            return False
        return cuda.can_use_flash_attention(cuda.SDPAParams(*qkv, None, args.dropout, args.causal, True))

    def forward(self, qkv: Three, mask: Tensor | None, args: SdpaArgs) -> KernelOutput:
        heads, lse, *rest = self.operators.forward(*qkv, args.dropout, args.causal, False, scale=args.scaling)
        return KernelOutput(heads, lse, tuple(rest[:6]))

    def backward(self, grad: Tensor, qkv: Three, mask: Tensor | None, output: KernelOutput, args: SdpaArgs) -> Three:
        *lengths, seed, offset = output.kept
        arguments = (grad, *qkv, output.heads, output.lse, *lengths, args.dropout, args.causal, seed, offset)
        grads: Three = self.operators.backward(*arguments, scale=args.scaling)
        return grads


class Efficient:
    """The memory-efficient kernel of CUDA. Its lse has a number of rows that is a multiple of 32; the last are inf."""

    device = "cuda"
    dtypes = (torch.float32, *HALF)
    drops = True
    operators: Any = operators(
        "_scaled_dot_product_efficient_attention",
        "query key value attn_bias compute_log_sumexp dropout_p is_causal scale",
        "grad_out_ query key value attn_bias out logsumexp philox_seed philox_offset dropout_p grad_input_mask "
        "is_causal scale",
    )
    on = staticmethod(cuda.mem_efficient_sdp_enabled)

    def prepared(self, qkv: Three, mask: Tensor | None) -> tuple[Three, Tensor | None]:
        query, key, value = _padded(qkv)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if mask is not None:
            mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
        return (query, key, value), mask

    def takes(self, qkv: Three, mask: Tensor | None, args: SdpaArgs) -> bool:
        return cuda.can_use_efficient_attention(cuda.SDPAParams(*qkv, mask, args.dropout, args.causal, False))

    def forward(self, qkv: Three, mask: Tensor | None, args: SdpaArgs) -> KernelOutput:
        heads, lse, *rest = self.operators.forward(*qkv, mask, True, args.dropout, args.causal, scale=args.scaling)
        return KernelOutput(heads, lse, tuple(rest))

    def backward(self, grad: Tensor, qkv: Three, mask: Tensor | None, output: KernelOutput, args: SdpaArgs) -> Three:
        wanted = [True, True, True, False]  # no gradient of the mask
        arguments = (grad, *qkv, mask, output.heads, output.lse, *output.kept, args.dropout, wanted, args.causal)
        grad_q, grad_k, grad_v, _ = self.operators.backward(*arguments, scale=args.scaling)
        return grad_q, grad_k, grad_v


Kernel = Cpu | Flash | Efficient
KERNELS: tuple[Kernel, ...] = (Cpu(), Flash(), Efficient())


def kernels(device: str, dtype: torch.dtype, dropout: bool) -> list[Kernel]:
    """The kernels for tensors of this dtype on this type of device that are there and switched on, the fastest first.

    Args:
        device: the type of the device.
        dtype: the dtype of query, key and value.
        dropout: True if weights are dropped.
    """
    if device == "cuda" and torch.version.hip is not None:  # AMD's kernels have the same names and another lse
        return []
    usable = []
    for kernel in KERNELS:  # a comprehension would be one more call in each layer
        fits = kernel.device == device and dtype in kernel.dtypes and (kernel.drops or not dropout)
        if fits and kernel.operators is not None and kernel.on():
            usable.append(kernel)
    return usable


def _padded(qkv: Three) -> Three:
    """Query, key and value with widths that are a multiple of `ALIGNED`, filled up with zeros."""
    missing = -qkv[0].shape[3] % ALIGNED
    if not missing:
        return qkv
    query, key, value = (F.pad(tensor, (0, missing)) for tensor in qkv)
    return query, key, value


def _aligned(mask: Tensor) -> Tensor:
    """The mask in memory where each row starts at a multiple of `ALIGNED` numbers."""
    if mask.stride(-1) == 1 and all(stride % ALIGNED == 0 for stride in mask.stride()[:-1]):
        return mask
    keys = mask.shape[-1]
    return F.pad(mask, (0, ALIGNED - keys % ALIGNED))[..., :keys]
