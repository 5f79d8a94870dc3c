"""Least squares per head from running sums. The activations are not kept.

A are the variant's heads and R the wanted heads, with a row per token. X = [A, 1] is A with a constant feature.

    map:   [M; b] = (X^T X + P)^-1 X^T R, where P is diagonal: ridge ||A||^2 / D for the D features, 0 for the constant
    gain:  g = <A, R> / ((1 + ridge) <A, A>)

R^2 = 1 - SSE / SST. SSE is the squared error of the fit, and SST is the squared distance of R from its mean.
docs/mathematics.md, section Calibration. Axes: N token, H head, D head width, F features (D and a constant).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.call import Geometry


class Moments:
    """Sums of products of the variant's heads A and the wanted heads R, in fp64 on the CPU."""

    def __init__(self, geometry: Geometry, fit: str) -> None:
        heads, width = geometry.heads, geometry.head_dim
        self.fit = fit
        self.rows = 0
        self.gram_HFF = torch.zeros(heads, width + 1, width + 1, dtype=torch.float64)
        self.cross_HFD = torch.zeros(heads, width + 1, width, dtype=torch.float64)
        self.square_H = torch.zeros(heads, dtype=torch.float64)

    def add(self, heads_NHD: Tensor, wanted_NHD: Tensor) -> None:
        """Add the heads of N real tokens to the sums."""
        # First to the CPU, then to fp64: some devices (Apple's) have no fp64.
        heads = heads_NHD.detach().cpu().double()
        wanted = wanted_NHD.detach().cpu().double().transpose(0, 1)
        features = torch.nn.functional.pad(heads, (0, 1), value=1.0).transpose(0, 1)
        self.rows += heads_NHD.shape[0]
        self.gram_HFF += features.transpose(1, 2) @ features
        self.cross_HFD += features.transpose(1, 2) @ wanted
        self.square_H += wanted.square().sum((1, 2))

    def solve(self, ridge: float, where: str) -> tuple[Tensor, Tensor | None]:
        """Solve for the gains (H,) and None, or for the maps (H,D,D) and their biases (H,D), in fp64.

        Raises:
            ValueError: there are fewer tokens than unknowns, or the activations are not finite.
        """
        width = self.cross_HFD.shape[2]
        needed = 1 if self.fit == "gain" else width + 1
        if self.rows < needed:
            raise ValueError(f"{where}: {self.rows} real tokens are too few for {needed} unknowns; pass more batches.")
        if not (self.gram_HFF.isfinite().all() and self.cross_HFD.isfinite().all()):
            raise ValueError(f"{where}: activations are not finite; check the model and the batches (fp16 overflows).")
        energy_H = self.gram_HFF.diagonal(dim1=1, dim2=2)[:, :width].sum(1)
        if self.fit == "gain":
            product_H = self.cross_HFD[:, :width].diagonal(dim1=1, dim2=2).sum(1)
            return product_H / (energy_H * (1 + ridge)).clamp_min(torch.finfo(torch.float64).tiny), None
        penalty_HF = (ridge / width * energy_H)[:, None].expand(-1, width + 1).clone()
        penalty_HF[:, width] = 0.0  # no penalty on the constant
        gram = self.gram_HFF + torch.diag_embed(penalty_HF)
        solution = torch.linalg.lstsq(gram, self.cross_HFD, driver="gelsd").solution
        return solution[:, :width], solution[:, width]

    def r_squared(self, weight: Tensor, bias: Tensor | None) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return R^2 per head, first of the variant's heads without a fit, then of the fitted heads."""
        width = self.cross_HFD.shape[2]
        identity = torch.eye(width, dtype=torch.float64).expand(weight.shape[0], -1, -1)
        none = torch.zeros(weight.shape[0], width, dtype=torch.float64)
        before = self._explained(identity, none)
        if bias is None:
            return before, self._explained(identity * weight[:, None, None], none)
        return before, self._explained(weight, bias)

    def _explained(self, weight_HDD: Tensor, bias_HD: Tensor) -> tuple[float, ...]:
        solution_HFD = torch.cat([weight_HDD, bias_HD[:, None]], 1)
        error_H = self.square_H - 2 * (solution_HFD * self.cross_HFD).sum((1, 2))
        error_H = error_H + (solution_HFD * (self.gram_HFF @ solution_HFD)).sum((1, 2))
        mean_HD = self.cross_HFD[:, -1] / self.rows
        total_H = self.square_H - self.rows * mean_HD.square().sum(1)
        return tuple((1 - error_H / total_H.clamp_min(torch.finfo(torch.float64).tiny)).tolist())
