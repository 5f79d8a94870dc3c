"""What a calibrated swap applies to its read-out, head by head: a gain, or a linear map with a bias.

gain: A_h -> g_h A_h; map: A_h -> A_h M_h + b_h; g = 1, M = I, b = 0 change nothing. Fitted by
`hf_attn_swap.conversion.calibrate` at strength 1; between, (1 - s) A + s calibrated(A).
Ours (no paper). Axes: B batch, L token, H head, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .call import Geometry

FITS = ("gain", "map")


class Calibration(nn.Module):
    """The fitted read-out of one layer: `weight` (H,) for a gain, `weight` (H,D,D) and `bias` (H,D) for a map.

    Args:
        fit: "gain" or "map".
        geometry: of the attention module.

    Raises:
        ValueError: an unknown fit.
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
        """(B,L,H,D) to (B,L,H,D)."""
        if self.fit == "gain":
            return (heads_BLHD * self.weight[:, None]).to(heads_BLHD.dtype)
        return ((heads_BLHD.transpose(1, 2) @ self.weight).transpose(1, 2) + self.bias).to(heads_BLHD.dtype)


def check_fit(fit: object) -> None:
    """Refuse what is no fit.

    Raises:
        ValueError: neither "gain" nor "map".
    """
    if fit not in FITS:
        raise ValueError(f"fit must be one of {', '.join(map(repr, FITS))}, got {fit!r}.")
