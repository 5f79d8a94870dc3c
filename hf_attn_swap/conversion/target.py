"""The target of a calibration: the heads with which a swapped block gives what its weights were trained to give.

A layer with input x gives c x + m Z, where Z is W_o(heads), or the heads themselves if the variant does not use W_o.
Z' = W_o(Y) is what the weights were trained for, with the heads Y of softmax attention. The wanted Z is f Z':

    pre-LayerNorm:   m Z = Z', so f = 1 / m
    post-LayerNorm:  LN(x + c x + m Z) = LN(x + Z'), so f = (1 + c) / m

Z and Z' both contain the bias b_o. So Z = f Z' holds for the heads R = f Y + (f - 1) W_o^-1 b_o.
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
        source: softmax attention, with which the weights were trained.
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
        return (1 + skip if self.site.family.post_norm else 1.0) / share

    @property
    def left(self) -> float:
        """The multiple of the input that the swap adds and that no fit can undo; 0 in a post-LayerNorm block."""
        return 0.0 if self.site.family.post_norm else _shares(self.swap)[0]

    def wanted(self, heads_BLHD: Tensor) -> Tensor:
        """Return the wanted heads R (B,L,H,D) of the swapped layer, from the heads (B,L,H,D) of the source."""
        flat = heads_BLHD.flatten(2)
        if self.swap.keeps_projection:
            return (self.factor * flat + self.offset).view_as(heads_BLHD)
        through: Tensor = self.projection(flat)
        return (self.factor * through).view_as(heads_BLHD)

    @cached_property
    def offset(self) -> Tensor | float:
        """(f - 1) W_o^-1 b_o, of width H D: the constant part of R; 0 for a gain, which has no constant.

        The inverse is damped where W_o is not well conditioned. W_o of a ViT has directions that are a million times
        weaker than others: a constant that reached b_o through them would be thousands of times larger than the heads,
        and no training could move W_o.
        """
        if not self.constant or self.factor == 1:
            return 0.0
        width = self.swap.geometry.heads * self.swap.geometry.head_dim
        readable = is_matrix(self.projection)
        weight, bias = (
            output_matrix(self.projection) if readable else _probed(self.projection, width, self.device_and_dtype)
        )
        if bias is None:
            return 0.0
        weight = weight.detach().cpu().double().T
        left, sizes, right = torch.linalg.svd(weight, full_matrices=False)
        damping = DAMPING * sizes[0] if sizes[0] > WELL_CONDITIONED * sizes[-1] else 0.0
        damped = sizes / (sizes.square() + damping**2)
        constant = right.T @ (damped * (left.T @ bias.detach().cpu().double()))
        offset: Tensor = (self.factor - 1) * constant.to(bias)
        return offset


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
