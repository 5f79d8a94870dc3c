"""One 8-bit tensor: its range, the rounding to it, and what gets lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

LEVELS = 255


@dataclass
class Point:
    """One quantised tensor: its range, and how much of it survives.

    Attributes:
        name: path of the module, and what of it: weight, input (a residual sum), output, scores, probabilities,
            context, query or key (after rotary embedding).
        low, high: ends of the range, which holds 0.
        signal, noise: sums of squares of the tensor and of its rounding error, while the ranges were found.
    """

    name: str
    low: float = 0.0
    high: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    seen: bool = False

    @property
    def step(self) -> float:
        """Width of one of the 255 steps."""
        return (self.high - self.low) / LEVELS

    @property
    def sqnr(self) -> float:
        """Signal to quantisation noise, in dB; infinite for a tensor that rounds to itself."""
        return 10 * math.log10(self.signal / self.noise) if self.noise > 0 < self.signal else math.inf

    def observe(self, tensor: Tensor, momentum: float) -> None:
        """Move the range towards this tensor's."""
        low, high = (float(end) for end in torch.aminmax(tensor))
        if not math.isfinite(low + high):
            raise ValueError(f"{self.name} is not finite; check the weights, the inputs and the dtype.")
        low, high = min(low, 0.0), max(high, 0.0)
        keep = momentum if self.seen else 0.0
        self.low, self.high = keep * self.low + (1 - keep) * low, keep * self.high + (1 - keep) * high
        self.seen = True

    def compare(self, tensor: Tensor, rounded: Tensor) -> None:
        """Count the tensor and its rounding error; in fp32 at least, on its device, which may have no fp64."""
        wide = torch.promote_types(tensor.dtype, torch.float32)
        self.signal += float(tensor.to(wide).square().sum())
        self.noise += float((tensor.to(wide) - rounded.to(wide)).square().sum())

    def apply(self, tensor: Tensor) -> Tensor:
        """The tensor rounded to the 256 values of the range; 0 stays 0."""
        if self.step == 0:
            return tensor
        zero = min(max(round(-self.low / self.step), 0), LEVELS)
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        return torch.fake_quantize_per_tensor_affine(wide, self.step, zero, 0, LEVELS).to(tensor.dtype)


@dataclass(frozen=True)
class Quantized:
    """What was quantised.

    Attributes:
        points: every tensor, in the order of the first pass.
        flops_covered: share of the matmul FLOPs of a pass whose two factors are 8-bit.
    """

    points: tuple[Point, ...]
    flops_covered: float

    def __str__(self) -> str:
        worst = sorted(self.points, key=lambda point: point.sqnr)[:10]
        lines = [f"{point.name}: [{point.low:.3g}, {point.high:.3g}], {point.sqnr:.1f} dB" for point in worst]
        share = f"{len(self.points)} tensors in 8 bits, {self.flops_covered:.1%} of the matmul FLOPs; the ten roughest:"
        return "\n".join([share, *lines])
