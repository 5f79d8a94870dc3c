"""What a swapped layer's heads should have been, for its block to do what the weights were trained for.

Layer output c x + m Z, Z = W_o(heads) or the heads themselves; primes mark the source. Wanted, pre-LayerNorm:
m Z = m' Z'. Post-LayerNorm, LN(x + c x + m Z) = LN(x + c' x + m' Z'): m Z = (1 + c) / (1 + c') m' Z'. Z = f Z' with b_o
in both asks for heads R = f Y + (f - 1) W_o^-1 b_o.
Axes: B batch, L token, H head, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..core.swap import Swap
from ..families import Site
from ..wiring.home import home


@dataclass(frozen=True)
class Target:
    """One layer: its swap, and the attention that its weights were trained with; `constant` if the fit has a bias.

    Raises:
        ValueError: the variant leaves nothing of the read-out.
    """

    site: Site
    swap: Swap
    source: Swap
    constant: bool = True

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
        """An empty tensor, for the layer's device and dtype."""
        return home(self.site.container, self.site.core)

    @property
    def factor(self) -> float:
        """The multiple of the source's Z that the swapped layer should give."""
        (skip, share), (source_skip, source_share) = _shares(self.swap), _shares(self.source)
        scale = (1 + skip) / (1 + source_skip) if self.site.family.post_norm else 1.0
        return scale * source_share / share

    @property
    def left(self) -> float:
        """The multiple of the input that the swap adds and no fit takes back: in a pre-norm block."""
        return 0.0 if self.site.family.post_norm else _shares(self.swap)[0] - _shares(self.source)[0]

    def wanted(self, heads_BLHD: Tensor) -> Tensor:
        """From the source's heads to what the swapped layer's should be: (B,L,H,D)."""
        ours, theirs = self.swap.keeps_projection, self.source.keeps_projection
        flat = heads_BLHD.flatten(2)
        if ours and theirs:
            flat = self.factor * flat + self.offset
        elif ours:
            flat = self.factor * self._back(flat) + self.offset
        else:
            flat = self.factor * (self._through(flat) if theirs else flat)
        return flat.view_as(heads_BLHD)

    @cached_property
    def offset(self) -> Tensor | float:
        """What W_o turns into the part of b_o that the factor asks for beside the heads; a gain cannot give it."""
        if not self.constant or self.factor == 1:
            return 0.0
        bias = self._matrix[1]
        return 0.0 if bias is None else self._heads_for((self.factor - 1) * bias)

    def _through(self, heads_BLE: Tensor) -> Tensor:
        out: Tensor = self.projection(heads_BLE)
        return out

    def _back(self, out_BLE: Tensor) -> Tensor:
        """The heads that W_o turns into this output (least squares, in fp64)."""
        bias = self._matrix[1]
        return self._heads_for(out_BLE if bias is None else out_BLE - bias)

    @cached_property
    def _matrix(self) -> tuple[Tensor, Tensor | None]:
        """W_o as (in, out), and its bias."""
        if is_matrix(self.projection):
            return output_matrix(self.projection)
        return _probed(self.projection, self.swap.geometry.heads * self.swap.geometry.head_dim, self.like)

    def _heads_for(self, out_E: Tensor) -> Tensor:
        """(...,E) to the (...,H D) that W_o turns into it."""
        weight = self._matrix[0].detach().cpu().double().T
        flat = out_E.detach().cpu().double().reshape(-1, out_E.shape[-1])
        solved: Tensor = torch.linalg.lstsq(weight, flat.T, driver="gelsd").solution.T
        return solved.reshape(*out_E.shape[:-1], -1).to(out_E.dtype).to(out_E.device)


def is_matrix(projection: nn.Module) -> bool:
    """True if the weight can be read: it is here, and it is a matrix of floating-point numbers.

    Offloaded weights are not here before their module is called; weights quantised to 4 bits are bytes.
    """
    weight = projection.weight
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2 and not weight.is_meta


PROBE = 256.0  # a power of two: the bias rounds the sum by so much less


@torch.no_grad()
def _probed(projection: nn.Module, width: int, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """The matrix (in, out) and the bias of an affine map, from what it does."""
    bias = projection(torch.zeros(1, width, device=like.device, dtype=like.dtype))
    probes = PROBE * torch.eye(width, device=like.device, dtype=like.dtype)
    return (projection(probes) - bias) / PROBE, bias[0]


def output_matrix(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    """W_o as (in, out), a view of the parameter, and its bias."""
    weight, bias = projection.weight, getattr(projection, "bias", None)
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    return (weight.T if isinstance(projection, nn.Linear) else weight), bias  # a Conv1D keeps it (in, out)


def _shares(swap: Swap) -> tuple[float, float]:
    return next((variant.shares for variant in swap.variants if variant.shares != (0.0, 1.0)), (0.0, 1.0))
