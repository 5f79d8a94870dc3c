"""Applies a fitted correction to the heads of a swapped layer, head by head: a gain, or a linear map with a bias.

gain: A_h -> g_h A_h. map: A_h -> A_h M_h + b_h. The values g = 1, M = I and b = 0 change nothing.
`hf_attn_swap.conversion.calibrate` fits the correction at strength 1. At a strength s between 0 and 1, the layer
computes (1 - s) A + s calibrated(A). `merge_calibration` folds it into exported weights.
No paper has this correction; see docs/mathematics.md, section Calibration.
Axes: B batch, L token, H head, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import Geometry
from ..core.checks import check_keys
from ..variants.base import Variant
from .fitted import HEADS, Fitted, fitted

FITS = ("gain", "map")


@fitted("calibration")
class Calibration(Fitted):
    """The fitted correction of one layer's heads.

    A gain has the parameter `weight` (H,). A map has the parameters `weight` (H,D,D) and `bias` (H,D).

    Args:
        fit: "gain" or "map".
        geometry: the sizes of the attention module.

    Raises:
        ValueError: `fit` is neither "gain" nor "map".
    """

    place = HEADS

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

    @classmethod
    def check(cls, spec: Any, classes: tuple[type[Variant], ...], strength: float) -> None:
        given = set(spec) if isinstance(spec, dict) else set()
        check_keys(spec, {"fit"} | ({"merged"} & given), "the calibration")
        check_fit(spec["fit"])
        if spec.get("merged", False) is not False:  # earlier versions wrote false for every calibration
            raise ValueError(
                "it was saved by an earlier version with a merged calibration (merged), which this version cannot run; "
                "convert the pretrained model anew, or install the version that saved it."
            )

    @classmethod
    def from_spec(cls, spec: Any, geometry: Geometry) -> Fitted:
        return cls(spec["fit"], geometry)

    def spec(self) -> dict[str, Any]:
        return {"fit": self.fit}

    def words(self) -> str:
        return f"calibrated ({self.fit})"

    def forward(self, heads_BLHD: Tensor) -> Tensor:
        """Correct the heads: from (B,L,H,D) to (B,L,H,D), in the dtype of `heads_BLHD`."""
        if self.fit == "gain":
            return (heads_BLHD * self.weight[:, None]).to(heads_BLHD.dtype)
        mapped_BHLD = heads_BLHD.transpose(1, 2) @ self.weight
        return (mapped_BHLD.transpose(1, 2) + self.bias).to(heads_BLHD.dtype)

    def linear(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, None if self.fit == "gain" else self.bias


def check_fit(fit: object) -> None:
    """Refuse a value that does not name a fit.

    Raises:
        ValueError: `fit` is neither "gain" nor "map".
    """
    if fit not in FITS:
        raise ValueError(f"fit must be one of {', '.join(map(repr, FITS))}, got {fit!r}.")
