"""Spearman's rank correlation, and how sure a difference of two of them is.

Axes: N row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

SAMPLES = 1000  # of the bootstrap


def ranks(values_N: Tensor) -> Tensor:
    """The rank of each value (N,) from 1, in float64; equal values share the mean of their ranks."""
    _, places_N, counts = torch.unique(values_N, return_inverse=True, return_counts=True)
    mean_ranks: Tensor = counts.double().cumsum(0) - (counts - 1) / 2
    return mean_ranks[places_N]


def rank_correlation(first_N: Tensor, second_N: Tensor) -> float:
    """Spearman's correlation of two lists of numbers, from -1 to 1.

    Returns 0 if all numbers of a list are equal, and NaN if a list has a NaN.
    """
    if bool(first_N.isnan().any()) or bool(second_N.isnan().any()):
        return math.nan
    found = float(torch.corrcoef(torch.stack([ranks(first_N), ranks(second_N)]))[0, 1])
    return 0.0 if math.isnan(found) else found


def difference_margin(ours_N: Tensor, theirs_N: Tensor, truth_N: Tensor) -> float:
    """Half of the 95 % interval of the difference of two rank correlations with the truth, by a paired bootstrap."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(SAMPLES):
        rows = torch.randint(len(truth_N), (len(truth_N),), generator=generator)
        truth = truth_N[rows]
        found.append(rank_correlation(ours_N[rows], truth) - rank_correlation(theirs_N[rows], truth))
    low, high = torch.tensor(found).quantile(torch.tensor([0.025, 0.975])).tolist()
    return float(high - low) / 2
