"""The target of a calibration: the heads with which a swapped block gives what its weights were trained to give.

A layer with input x gives c x + m Z, where Z is W_o(heads), or the heads themselves if the variant does not use W_o.
c', m' and Z' are those of the source, the attention that the weights were trained with. The wanted Z is f Z':

    pre-LayerNorm:   m Z = m' Z', so f = m' / m
    post-LayerNorm:  LN(x + c x + m Z) = LN(x + c' x + m' Z'), so f = (1 + c) / (1 + c') m' / m

Z and Z' both contain the bias b_o. So Z = f Z' holds for the heads R = f Y + (f - 1) W_o^-1 b_o, Y the source's heads.
W_o^-1 may be damped, see `Target.offset`. The method is this package's own; docs/mathematics.md, section Calibration.
Axes: B batch, L token, H head, D head width, E model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ..core.call import DeviceAndDtype
from ..families import Site
from ..layer.swap import Swap
from ..wiring.device_and_dtype import device_and_dtype
from ..wiring.layers import Layer

WELL_CONDITIONED = 1e3  # up to this condition number, W_o is inverted exactly
DAMPING = 0.01  # of the inverse of W_o, as a share of its largest singular value


@dataclass(frozen=True)
class Target:
    """The target of one layer.

    Attributes:
        layer: the swapped layer, whose heads are fitted.
        source: the attention that the weights were trained with.
        constant: True if the fit has a bias (a map), False if it has none (a gain).

    Raises:
        ValueError: the variant's output does not contain the heads (m = 0), so there is nothing to fit.
    """

    layer: Layer
    source: Swap
    constant: bool = True

    def __post_init__(self) -> None:
        if _shares(self.swap)[1] == 0:
            raise ValueError(
                f"{'+'.join(self.swap.names)} with these options drops the read-out, so nothing can be calibrated; "
                "choose other options (modern_hopfield: alpha below 1)."
            )

    @property
    def site(self) -> Site:
        """The attention block."""
        return self.layer.site

    @property
    def swap(self) -> Swap:
        """The swapped attention."""
        return self.layer.swap

    @property
    def projection(self) -> nn.Module:
        """The module of W_o."""
        assert self.site.family.output is not None
        return self.site.container.get_submodule(self.site.family.output)

    @property
    def device_and_dtype(self) -> DeviceAndDtype:
        """The device and the dtype of the layer."""
        return device_and_dtype(self.site.container, self.site.core)

    @property
    def factor(self) -> float:
        """f: the multiple of the source's Z' that the swapped layer should give."""
        skip, share = _shares(self.swap)
        source_skip, source_share = _shares(self.source)
        scale = (1 + skip) / (1 + source_skip) if self.site.family.post_norm else 1.0
        return scale * source_share / share

    @property
    def left(self) -> float:
        """The multiple of the input that the swap adds and that no fit can undo; 0 in a post-LayerNorm block."""
        if self.site.family.post_norm:
            return 0.0
        return _shares(self.swap)[0] - _shares(self.source)[0]

    def wanted(self, heads_BLHD: Tensor) -> Tensor:
        """Return the wanted heads R (B,L,H,D) of the swapped layer, from the heads (B,L,H,D) of the source."""
        ours, theirs = self.swap.keeps_projection, self.source.keeps_projection
        flat = heads_BLHD.flatten(2)
        if ours and theirs:
            flat = self.factor * flat + self.offset
        elif ours:
            flat = self.factor * self._back(flat) + self.offset
        elif theirs:
            flat = self.factor * self._through(flat)
        else:
            flat = self.factor * flat
        return flat.view_as(heads_BLHD)

    @cached_property
    def offset(self) -> Tensor | float:
        """(f - 1) W_o^-1 b_o, of width H D: the constant part of R; 0 for a gain, which has no constant.

        The inverse is damped where W_o is not well conditioned. W_o of a ViT has directions that are a million times
        weaker than others: a constant that reached b_o through them would be thousands of times larger than the heads,
        and no training could move W_o.
        """
        if not self.constant or self.factor == 1:
            return 0.0
        bias = self._matrix[1]
        if bias is None:
            return 0.0
        weight = self._matrix[0].detach().cpu().double().T
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
        damping = DAMPING * sizes[0] if sizes[0] > WELL_CONDITIONED * sizes[-1] else 0.0
        damped = sizes / (sizes.square() + damping**2)
        constant = right.T @ (damped * (left.T @ bias.detach().cpu().double()))
        offset: Tensor = (self.factor - 1) * constant.to(bias)
        return offset

    def _through(self, heads_BLE: Tensor) -> Tensor:
        out: Tensor = self.projection(heads_BLE)
        return out

    def _back(self, out_BLE: Tensor) -> Tensor:
        """Return the heads that W_o turns into this output, by least squares in fp64."""
        bias = self._matrix[1]
        return self._heads_for(out_BLE if bias is None else out_BLE - bias)

    @cached_property
    def _matrix(self) -> tuple[Tensor, Tensor | None]:
        """W_o as a matrix (H D,E), and b_o (E,) or None."""
        if is_matrix(self.projection):
            return output_matrix(self.projection)
        return _probed(self.projection, self.swap.geometry.heads * self.swap.geometry.head_dim, self.device_and_dtype)

    def _heads_for(self, out_E: Tensor) -> Tensor:
        """Return the heads (...,H D) that the matrix of W_o turns into an output (...,E), without the bias."""
        weight = self._matrix[0].detach().cpu().double().T
        flat = out_E.detach().cpu().double().reshape(-1, out_E.shape[-1])
        solved: Tensor = torch.linalg.lstsq(weight, flat.T, driver="gelsd").solution.T
        return solved.reshape(*out_E.shape[:-1], -1).to(out_E.dtype).to(out_E.device)


def is_matrix(projection: nn.Module) -> bool:
    """Return True if the weight can be read as a matrix of floating-point numbers.

    Offloaded weights are on the meta device until their module is called. Weights quantised to 4 bits are bytes.
    """
    weight = projection.weight
    return isinstance(weight, Tensor) and weight.is_floating_point() and weight.dim() == 2 and not weight.is_meta


PROBE = 256.0  # large, so that adding the bias loses few digits of the matrix; a power of two divides exactly


@torch.no_grad()
def _probed(projection: nn.Module, width: int, at: DeviceAndDtype) -> tuple[Tensor, Tensor | None]:
    """Return the matrix (width,E) and the bias (E,) of an affine map, from its outputs on the rows of an identity."""
    bias = projection(torch.zeros(1, width, device=at.device, dtype=at.dtype))
    probes = PROBE * torch.eye(width, device=at.device, dtype=at.dtype)
    return (projection(probes) - bias) / PROBE, bias[0]


def output_matrix(projection: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the weight of a projection as (input width, output width), a view of the parameter, and its bias."""
    weight = projection.weight
    bias = getattr(projection, "bias", None)
    assert isinstance(weight, Tensor)
    assert bias is None or isinstance(bias, Tensor)
    if isinstance(projection, nn.Linear):
        return weight.T, bias
    return weight, bias  # a Conv1D stores its weight as (input width, output width)


def _shares(swap: Swap) -> tuple[float, float]:
    """Return (c, m) of the layer's output c x + m Z at strength 1."""
    for variant in swap.variants:
        if variant.shares != (0.0, 1.0):
            return variant.shares
    return 0.0, 1.0
