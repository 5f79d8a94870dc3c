"""Applies a fitted correction to the heads of a swapped layer, head by head: a gain, or a linear map with a bias.

gain: A_h -> g_h A_h. map: A_h -> A_h M_h + b_h. The values g = 1, M = I and b = 0 change nothing.
`hf_attn_swap.conversion.calibrate` fits the correction at strength 1. At a strength s between 0 and 1, the layer
computes (1 - s) A + s calibrated(A).
No paper has this correction; see docs/mathematics.md, section Calibration.
Axes: B batch, L token, H head, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..core.call import Geometry

FITS = ("gain", "map")


class Calibration(nn.Module):
    """The fitted correction of one layer's heads.

    A gain has the parameter `weight` (H,). A map has the parameters `weight` (H,D,D) and `bias` (H,D).

    Args:
        fit: "gain" or "map".
        geometry: the sizes of the attention module.

    Raises:
        ValueError: `fit` is neither "gain" nor "map".
    """

    def __init__(self, fit: str, geometry: Geometry) -> None:
        super().__init__()
        check_fit(fit)
        self.fit = fit
        heads, width = geometry.heads, geometry.head_dim
        if fit == "gain":
            self.weight = nn.Parameter(torch.ones(heads))
        else:
            self.weight = nn.Parameter(torch.eye(width).repeat(heads, 1, 1))
            self.bias = nn.Parameter(torch.zeros(heads, width))

    def forward(self, heads_BLHD: Tensor) -> Tensor:
        """Correct the heads: from (B,L,H,D) to (B,L,H,D), in the dtype of `heads_BLHD`."""
        if self.fit == "gain":
            return (heads_BLHD * self.weight[:, None]).to(heads_BLHD.dtype)
        mapped_BHLD = heads_BLHD.transpose(1, 2) @ self.weight
        return (mapped_BHLD.transpose(1, 2) + self.bias).to(heads_BLHD.dtype)


def check_fit(fit: object) -> None:
    """Refuse a value that does not name a fit.

    Raises:
        ValueError: `fit` is neither "gain" nor "map".
    """
    if fit not in FITS:
        raise ValueError(f"fit must be one of {', '.join(map(repr, FITS))}, got {fit!r}.")
