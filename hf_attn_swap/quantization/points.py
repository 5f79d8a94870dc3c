"""One 8-bit tensor: its range, and its rounding to 256 values.

docs/mathematics.md, section Quantisation to 8 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

Range = tuple[float, float]  # the ends of the range of a module's inputs; 0 lies between them

LEVELS = 255
MOMENTUM = 0.9  # of the running means that give ranges
HALF = 127  # steps from 0 to the largest weight of a row


@dataclass
class Point:
    """One quantised tensor and its range.

    Attributes:
        name: path of the module and the kind of tensor: weight, input (a residual sum), output, scores, probabilities,
            context, query or key (after rotary embedding).
        low, high: ends of the range, which always holds 0.
        seen: True once the tensor has a range.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    seen: bool = False

    @property
    def step(self) -> float:
        """The width of one of the 255 steps of the range."""
        return (self.high - self.low) / LEVELS

    def observe(self, tensor: Tensor, momentum: float = MOMENTUM) -> None:
        """Update the range by the running mean with the tensor's minimum and maximum; momentum weighs the old range.

        Raises:
            ValueError: the tensor is not finite.
        """
        low, high = (float(end) for end in torch.aminmax(tensor))
        if not math.isfinite(low + high):
            raise ValueError(f"{self.name} is not finite; check the weights, the inputs and the dtype.")
        keep = momentum if self.seen else 0.0
        self.low = keep * self.low + (1 - keep) * min(low, 0.0)
        self.high = keep * self.high + (1 - keep) * max(high, 0.0)
        self.seen = True

    def apply(self, tensor: Tensor) -> Tensor:
        """Return the tensor rounded to the 256 values of its range, in its shape and dtype; 0 stays 0."""
        if self.step == 0:
            return tensor
        zero = min(max(round(-self.low / self.step), 0), LEVELS)
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        return torch.fake_quantize_per_tensor_affine(wide, self.step, zero, 0, LEVELS).to(tensor.dtype)


def int8_rows(weight: Tensor, axis: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix in 8 bits, symmetric, with one step for each index of an axis: max |w| / 127.

    Returns:
        The whole numbers in fp32 at least, in the shape of the weight; and the steps, with an axis of length 1, in the
        dtype of the weight, because a checkpoint is loaded in one dtype.
    """
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    steps = (wide.abs().amax(1 - axis, keepdim=True) / HALF).to(weight.dtype)
    steps = steps.clamp_min(torch.finfo(weight.dtype).tiny)
    return (wide / steps.to(wide.dtype)).round_().clamp_(-HALF, HALF), steps


def token_steps(x_MK: Tensor) -> Tensor:
    """The step of each token's 8-bit range, max |x| / 127, (M,1) in fp32."""
    return (x_MK.abs().amax(-1, keepdim=True).float() / HALF).clamp_min(torch.finfo(torch.float32).tiny)


def rounded_tokens(x: Tensor) -> Tensor:
    """Inputs (...,K) rounded to 8 bits, symmetric, with one range per token; in their shape and dtype."""
    steps = token_steps(x)
    return (torch.mul(x, steps.reciprocal()).round_() * steps).to(x.dtype)


def rounded_rows(weight: Tensor, axis: int) -> Tensor:
    """The matrix that `int8_rows` stands for, in the dtype of the weight."""
    whole, steps = int8_rows(weight, axis)
    return (whole * steps).to(weight.dtype)
