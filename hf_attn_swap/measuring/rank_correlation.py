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

    Returns 0 if all numbers of a list are equal, and NaN if a list has a NaN.
    """
    from scipy.stats import spearmanr  # slow to import, and most measures do without

    if any(bool((each == each[0]).all()) for each in (first_N, second_N)):
        return 0.0
    return float(spearmanr(first_N, second_N).statistic)


def difference_margin(ours_N: Tensor, theirs_N: Tensor, truth_N: Tensor) -> float:
    """Half of the 95 % interval of the difference of two rank correlations with the truth, by a paired bootstrap.

    NaN if a number is not finite.
    """
    from scipy.stats import bootstrap

    if not all(bool(each.isfinite().all()) for each in (ours_N, theirs_N, truth_N)):
        return math.nan
    found = bootstrap(
        [each.numpy() for each in (ours_N, theirs_N, truth_N)],
        lambda ours, theirs, truth: rank_correlation(ours, truth) - rank_correlation(theirs, truth),
        n_resamples=SAMPLES,
        vectorized=False,
        paired=True,
        method="percentile",
        rng=0,
    )
    low, high = found.confidence_interval
    return float(high - low) / 2
