"""A Linear whose matrix product runs in 8-bit integers: one step per weight row, one range for all inputs or per token.

y = s_x s_n (sum_k q_mk w_nk - z sum_k w_nk) + b, with q = clamp(round(x / s_x) + z, 0, 255) and W_nk = s_n w_nk.
The products are added in 32 bits. With infinitely small steps y is the Linear's own output.
The tensors have the names and the layout of the format int-quantized of compressed-tensors, which engines read.
docs/mathematics.md, section Quantisation to 8 bits. Axes: M rows of the input, K inputs, N outputs.
"""

from __future__ import annotations

import functools
import itertools
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..functional.linear import without_autocast
from .points import HALF, LEVELS, Range, int8_rows, token_steps

LOWEST = -128  # the lowest rounded input as it is stored; the formula above counts from 0
WIDEST = (2**31 - 1) // (LEVELS * HALF)  # the number of products that surely fit into 32 bits
EXACT = 512  # inputs at a time in fp32: their products add up to less than 2^24, so that no sum is rounded


class Int8Linear(nn.Module):
    """Computes a Linear with int8 weights and inputs rounded to 256 values. It has no gradients.

    On a CPU, PyTorch's integer matrix product runs, if it is exact and fast here (`integers`). Elsewhere the same whole
    numbers are multiplied in fp32, some at a time, with equal bits. Inputs are rounded as PyTorch's fake quantisation
    rounds them.

    Args:
        weight_NK: the rounded weights, int8.
        bias_N: the bias, or None.
        steps_N1: the step of each row of the weights.
        step: the step of the inputs, one number; None if each token has its own, max |x| / 127, found as it comes.
        zero: the rounded input that stands for 0, from -128 to 127, one number in int8; None if it is 0 by the scheme,
            which is then symmetric.
    """

    weight: Tensor
    bias: Tensor | None
    weight_scale: Tensor
    input_scale: Tensor | None
    input_zero_point: Tensor | None
    sums: Tensor

    def __init__(
        self, weight_NK: Tensor, bias_N: Tensor | None, steps_N1: Tensor, step: Tensor | None, zero: Tensor | None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        self.weight = nn.Parameter(weight_NK.contiguous(), requires_grad=False)
        self.register_parameter("bias", None if bias_N is None else nn.Parameter(bias_N.detach(), requires_grad=False))
        self.register_buffer("weight_scale", steps_N1)
        self.register_buffer("input_scale", None if step is None else step.reshape(1))
        self.register_buffer("input_zero_point", None if zero is None else zero.reshape(1))
        self.register_buffer("sums", None, persistent=False)
        self.register_load_state_dict_post_hook(_fill)  # type: ignore[no-untyped-call]
        self.fill()

    @classmethod
    def rounded(
        cls, weight_NK: Tensor, bias_N: Tensor | None, ends: Range | None, *, symmetric: bool = False
    ) -> Int8Linear:
        """Round the weights of a Linear.

        All steps are numbers of the weights' dtype, because a checkpoint is loaded in one dtype.

        Args:
            weight_NK: the weights in floating point.
            bias_N: the bias, or None.
            ends: the ends of the range of the inputs, at most 0 and at least 0; None for a range per token.
            symmetric: True for a range from -r to r: a part of its values may then never be used.
        """
        weight_NK = weight_NK.detach()
        dtype, device = weight_NK.dtype, weight_NK.device
        rounded_NK, steps_N1 = int8_rows(weight_NK)
        if ends is None:
            return cls(rounded_NK.to(torch.int8), bias_N, steps_N1, None, None)
        low, high = ends
        width = max(-low, high) / HALF if symmetric else (high - low) / LEVELS
        step = torch.tensor(width, dtype=dtype, device=device).clamp_min(torch.finfo(dtype).tiny)
        zero = None
        if not symmetric:
            lowest = min(max(round(-low / float(step)), 0), LEVELS) + LOWEST
            zero = torch.tensor(lowest, dtype=torch.int8, device=device)
        return cls(rounded_NK.to(torch.int8), bias_N, steps_N1, step, zero)

    def fill(self) -> None:
        """Add up each row of the weights. This happens once, and again whenever the weights are loaded or moved."""
        integers()  # known before a program is recorded or compiled
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
        stored = 0 if self.input_zero_point is None else self.input_zero_point.to(torch.int32)
        zero = stored + (lowest - LOWEST)
        x_MK = x.reshape(-1, self.in_features)
        step = token_steps(x_MK) if self.input_scale is None else self.input_scale.float()
        q_MK = torch.mul(x_MK, step.reciprocal()).round_().add_(zero)
        q_MK.clamp_(lowest, lowest + LEVELS)
        if kind is None:
            sums_MN = _product(q_MK.sub_(zero).float(), self.weight)
        else:
            sums_MN = torch._int_mm(q_MK.to(kind), self.weight.t()).sub_(zero * self.sums).float()
        y_MN = sums_MN.mul_(self.weight_scale.float().mT * step)
        if self.bias is not None:
            y_MN += self.bias
        return y_MN.to(x.dtype).reshape(*x.shape[:-1], self.out_features)


@functools.cache
def integers() -> torch.dtype | None:
    """The dtype of rounded inputs for the integer matrix product of this processor; None if fp32 is to be used.

    The product must be exact: versions of PyTorch before 2.12 do not take uint8 on a CPU, and a processor may add pairs
    of its products in 16 bits, which are too few. Known numbers at the ends of the range show both. And it must be
    faster than fp32: without VNNI, as on many processors of AMD and all older ones, it is some 30 times slower. It is
    timed once.
    """
    ends = {torch.uint8: (0, 255), torch.int8: (-128, 127)}
    tried = {kind: itertools.product(ends[kind], (-127, 127), (1, 32)) for kind in ends}
    exact = [kind for kind, cases in tried.items() if all(_exact(kind, *case) for case in cases)]
    return min((*exact, None), key=_seconds)


def _seconds(kind: torch.dtype | None) -> float:
    """The time of a small product of rounded inputs in this dtype, or in fp32: the shortest of four."""
    q_MK, weight_NK = torch.ones(32, 256, device="cpu"), torch.ones(256, 256, dtype=torch.int8, device="cpu")

    def product() -> Tensor:
        return _product(q_MK, weight_NK) if kind is None else torch._int_mm(q_MK.to(kind), weight_NK.t())

    return min(timeit.repeat(product, number=1, repeat=4))


def _product(q_MK: Tensor, weight_NK: Tensor) -> Tensor:
    """The product of whole numbers from -255 to 255, in fp32, with rounded weights: exact up to the last rounding."""
    with without_autocast(q_MK.device):
        pairs = zip(torch.split(q_MK, EXACT, 1), torch.split(weight_NK, EXACT, 1), strict=True)
        sums = [F.linear(q, weight.float()) for q, weight in pairs]
    return sums[0] if len(sums) == 1 else sum((one.int() for one in sums[1:]), sums[0].int()).float()


def _exact(kind: torch.dtype, end: int, weight: int, rows: int) -> bool:
    """True if the integer matrix product of constant matrices has the value that it must have."""
    q = torch.full((rows, 64), end, dtype=kind, device="cpu")
    w = torch.full((64, 64), weight, dtype=torch.int8, device="cpu")
    try:
        result = torch._int_mm(q, w.t())
    except (RuntimeError, NotImplementedError):
        return False
    return result.dtype == torch.int32 and bool((result == 64 * end * weight).all())


def _fill(module: Any, keys: Any) -> None:
    module.fill()
