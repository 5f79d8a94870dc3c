"""Spearman's rank correlation by SciPy, and how sure a difference of two of them is.

Axes: N row.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

SAMPLES = 1000  # of the bootstrap


def rank_correlation(first_N: Any, second_N: Any) -> float:
    """Spearman's correlation of two lists of numbers, from -1 to 1.

    Returns NaN if a list has a NaN, and otherwise 0 if all numbers of a list are equal.
    """
    from scipy.stats import spearmanr  # slow to import, and most measures do without

    if any(bool((values_N != values_N).any()) for values_N in (first_N, second_N)):
        return math.nan
    if any(bool((values_N == values_N[0]).all()) for values_N in (first_N, second_N)):
        return 0.0
    return float(spearmanr(first_N, second_N).statistic)


def difference_margin(ours_N: Tensor, theirs_N: Tensor, truth_N: Tensor) -> float:
    """Half of the 95 % interval of the difference of two rank correlations with the truth, by a paired bootstrap.

    NaN if a number is not finite.
    """
    from scipy.stats import bootstrap

    samples = ours_N, theirs_N, truth_N
    if not all(bool(sample_N.isfinite().all()) for sample_N in samples):
        return math.nan
    result = bootstrap(
        [sample_N.numpy() for sample_N in samples],
        lambda ours, theirs, truth: rank_correlation(ours, truth) - rank_correlation(theirs, truth),
        n_resamples=SAMPLES,
        vectorized=False,
        paired=True,
        method="percentile",
        rng=0,
    )
    low, high = result.confidence_interval
    return float(high - low) / 2
