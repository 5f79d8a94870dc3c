"""A Linear whose matrix product runs in 8-bit integers: one static range for its inputs, one step per weight row.

y = s_x s_n (sum_k q_mk w_nk - z sum_k w_nk) + b, with q = clamp(round(x / s_x) + z, 0, 255) and W_nk = s_n w_nk.
The products are added in 32 bits. With infinitely small steps y is the Linear's own output.
The tensors have the names and the layout of the format int-quantized of compressed-tensors, which engines read.
docs/mathematics.md, section Quantisation to 8 bits. Axes: M rows of the input, K inputs, N outputs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 127  # the largest rounded weight, on both sides of 0
LEVELS = 255  # the number of steps in the range of the inputs
LOWEST = -128  # the lowest rounded input as it is stored; the formula above counts from 0
WIDEST = (2**31 - 1) // (LEVELS * LARGEST)  # the number of products that surely fit into 32 bits


class Int8Linear(nn.Module):
    """Computes a Linear with int8 weights and inputs rounded to 256 values. It has no gradients.

    On a CPU, PyTorch's integer matrix product runs, if it is exact here (`integers`). Elsewhere the same whole numbers
    are multiplied in fp32, with equal bits while the sums are below 2^24. Inputs are rounded as PyTorch's fake
    quantisation rounds them.

    Args:
        weight_NK: the rounded weights, int8.
        bias_N: the bias, or None.
        steps_N1: the step of each row of the weights.
        step: the step of the inputs, one number.
        zero: the rounded input that stands for 0, from -128 to 127, one number in int8.
    """

    weight: Tensor
    bias: Tensor | None
    weight_scale: Tensor
    input_scale: Tensor
    input_zero_point: Tensor
    sums: Tensor

    def __init__(self, weight_NK: Tensor, bias_N: Tensor | None, steps_N1: Tensor, step: Tensor, zero: Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        self.weight = nn.Parameter(weight_NK.contiguous(), requires_grad=False)
        self.register_parameter("bias", None if bias_N is None else nn.Parameter(bias_N.detach(), requires_grad=False))
        self.register_buffer("weight_scale", steps_N1)
        self.register_buffer("input_scale", step.reshape(1))
        self.register_buffer("input_zero_point", zero.reshape(1))
        self.register_buffer("sums", None, persistent=False)
        self.register_load_state_dict_post_hook(_fill)  # type: ignore[no-untyped-call]
        self.fill()

    @classmethod
    def rounded(
        cls, weight_NK: Tensor, bias_N: Tensor | None, low: float, high: float, *, symmetric: bool = False
    ) -> Int8Linear:
        """Round the weights of a Linear.

        All steps are numbers of the weights' dtype, because a checkpoint is loaded in one dtype.

        Args:
            weight_NK: the weights in floating point.
            bias_N: the bias, or None.
            low: the lower end of the range of the inputs, at most 0.
            high: the upper end, at least 0.
            symmetric: True for a range from -r to r: a part of its values may then never be used.
        """
        weight_NK = weight_NK.detach()
        dtype, device = weight_NK.dtype, weight_NK.device
        small = torch.finfo(dtype).tiny
        if symmetric:
            low, high = -max(-low, high), max(-low, high)
        width = (high - low) / (2 * LARGEST if symmetric else LEVELS)
        step = torch.tensor(width, dtype=dtype, device=device).clamp_min(small)
        zero = 0 if symmetric else min(max(round(-low / float(step)), 0), LEVELS) + LOWEST
        wide_NK = weight_NK.float()
        steps_N1 = (wide_NK.abs().amax(1, keepdim=True) / LARGEST).to(dtype).clamp_min(small)
        rounded_NK = (wide_NK / steps_N1.float()).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        return cls(rounded_NK, bias_N, steps_N1, step, torch.tensor(zero, dtype=torch.int8, device=device))

    def fill(self) -> None:
        """Add up each row of the weights. This happens once, and again whenever the weights are loaded or moved."""
        self.sums = self.weight.sum(1, dtype=torch.int32)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Int8Linear:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.fill()
        return self

    def extra_repr(self) -> str:
        """The sizes, for `print`."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"

    def forward(self, x: Tensor) -> Tensor:
        """Compute the layer.

        Args:
            x: shape (..., K).

        Returns:
            shape (..., N), in the dtype of `x`.

        Raises:
            ValueError: the input needs a gradient, or is itself rounded: a module that casts its input to the dtype of
                the next weights would do so.
        """
        if not x.is_floating_point():
            raise ValueError(f"the inputs of 8-bit integers come in floating point, got {x.dtype}; leave this out.")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError("a model in 8-bit integers has no gradients; call it under torch.no_grad().")
        kind = integers() if x.device.type == "cpu" else None
        lowest = 0 if kind == torch.uint8 else LOWEST
        zero = self.input_zero_point.to(torch.int32) + (lowest - LOWEST)
        step = self.input_scale.float()
        q_MK = torch.mul(x.reshape(-1, self.in_features), step.reciprocal()).round_().add_(zero)
        q_MK.clamp_(lowest, lowest + LEVELS)
        if kind is None:
            sums_MN = F.linear(q_MK.sub_(zero), self.weight.float())
        else:
            sums_MN = torch._int_mm(q_MK.to(kind), self.weight.t()).sub_(zero * self.sums).float()
        y_MN = sums_MN.mul_((self.weight_scale.float() * step).flatten())
        if self.bias is not None:
            y_MN += self.bias
        return y_MN.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


@functools.cache
def integers() -> torch.dtype | None:
    """The dtype of rounded inputs for which this machine's integer matrix product is exact; None if there is none.

    uint8 is the faster one. Versions of PyTorch before 2.12 do not take it on a CPU, and a processor may add pairs of
    its products in 16 bits, which are too few. Known numbers at the ends of the range show both.
    """
    for kind, ends in ((torch.uint8, (0, 255)), (torch.int8, (-128, 127))):
        if all(_exact(kind, end, weight, rows) for end, weight, rows in itertools.product(ends, (-127, 127), (1, 32))):
            return kind
    return None


def _exact(kind: torch.dtype, end: int, weight: int, rows: int) -> bool:
    """True if the integer matrix product of constant matrices has the value that it must have."""
    q, w = torch.full((rows, 64), end, dtype=kind), torch.full((64, 64), weight, dtype=torch.int8)
    try:
        found = torch._int_mm(q, w.t())
    except (RuntimeError, NotImplementedError):
        return False
    return found.dtype == torch.int32 and bool((found == 64 * end * weight).all())


def _fill(module: Any, keys: Any) -> None:
    module.fill()
