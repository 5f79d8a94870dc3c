"""What a swapped layer's heads should have been, for its block to do what the weights were trained for.

Layer output c x + m Z, Z = W_o(heads) or the heads themselves; primes mark the source. Wanted, pre-LayerNorm:
m Z = m' Z'. Post-LayerNorm, LN(x + c x + m Z) = LN(x + c' x + m' Z'): m Z = (1 + c) / (1 + c') m' Z'.
Axes: B batch, L token, H head, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..compute import FusedSoftmax, Inputs
from ..families import Site
from ..swap import Swap
from ..variants.base import Call


@dataclass(frozen=True)
class Target:
    """One layer: its swap, and the attention that its weights were trained with.

    Raises:
        ValueError: the variant leaves nothing of the read-out.
    """

    site: Site
    swap: Swap
    source: Swap

    def __post_init__(self) -> None:
        if _shares(self.swap)[1] == 0:
            raise ValueError(
                f"{'+'.join(self.swap.names)} with these options drops the read-out: nothing to calibrate."
            )

    @property
    def projection(self) -> nn.Module:
        """W_o."""
        assert self.site.family.output is not None
        return self.site.container.get_submodule(self.site.family.output)

    @property
    def like(self) -> Tensor:
        """A weight of the layer, for device and dtype."""
        return next(p for p in self.site.container.parameters() if p.is_floating_point())

    @property
    def factor(self) -> float:
        """The multiple of the source's Z that the swapped layer should give."""
        (skip, share), (source_skip, source_share) = _shares(self.swap), _shares(self.source)
        scale = (1 + skip) / (1 + source_skip) if self.site.family.post_norm else 1.0
        return scale * source_share / share

    def __call__(self, inputs: Inputs, call: Call, sdpa: FusedSoftmax) -> tuple[Tensor, Tensor]:
        """The source's heads, and what the swapped layer's heads should be: (B,L,H,D) both."""
        heads = self.source(inputs, Call(x=call.x, start=call.start, carried=call.carried), sdpa, False)[0]
        ours, theirs = self.swap.keeps_projection, self.source.keeps_projection
        if ours == theirs:
            return heads, self.factor * heads
        flat = heads.flatten(2)
        wanted = self._through(flat) if theirs else self._back(flat)
        return heads, self.factor * wanted.view_as(heads)

    def _through(self, heads_BLE: Tensor) -> Tensor:
        out: Tensor = self.projection(heads_BLE)
        return out

    def _back(self, out_BLE: Tensor) -> Tensor:
        """The heads that W_o turns into this output (least squares, in fp64)."""
        weight, bias = output_matrix(self.projection)
        out = out_BLE.double() - (bias.double() / self.factor if bias is not None else 0.0)
        solved = torch.linalg.lstsq(weight.double().T.cpu(), out.flatten(0, 1).T.cpu(), driver="gelsd").solution
        heads_BLE: Tensor = solved.T.reshape(out_BLE.shape).to(out_BLE)
        return heads_BLE


def output_matrix(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    """W_o as (in, out), a view of the parameter, and its bias."""
    weight, bias = projection.weight, getattr(projection, "bias", None)
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return (weight.T if isinstance(projection, nn.Linear) else weight), bias  # a Conv1D keeps it (in, out)


def _shares(swap: Swap) -> tuple[float, float]:
    return next((variant.shares for variant in swap.variants if variant.shares != (0.0, 1.0)), (0.0, 1.0))
