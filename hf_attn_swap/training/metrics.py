"""The metrics of the recipes, and the interval of a difference to the control."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

Function = Callable[[Sequence[float], Sequence[float]], float]


def _correlation(function: Any, references: Sequence[float], predictions: Sequence[float]) -> float:
    """A correlation of SciPy; 0 where all numbers of a side are equal, for which SciPy warns and gives NaN."""
    constant = any(np.ptp(side) == 0 for side in (references, predictions))
    return 0.0 if constant else float(function(references, predictions).statistic)


FUNCTIONS: dict[str, Function] = {
    # scikit-learn's accuracy_score checks its input for milliseconds, too slow for a bootstrap of a thousand calls
    "accuracy": lambda references, predictions: float(np.mean(np.equal(references, predictions))),
    "f1": lambda references, predictions: f1_score(
        references, predictions, average="binary" if len(set(references) | set(predictions)) <= 2 else "macro"
    ),
    "matthews_correlation": matthews_corrcoef,
    "pearsonr": functools.partial(_correlation, pearsonr),
    "spearmanr": functools.partial(_correlation, spearmanr),
    "perplexity": lambda _, losses: float(np.exp(np.mean(losses))),
    "mse": lambda _, losses: float(np.mean(losses)),
}
OUTLIERS = ("kurtosis", "max_inf_norm")
LOWER_IS_BETTER = ("perplexity", "kl", "mse", "mae", *OUTLIERS)


def scores(names: Sequence[str], predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """The values of the named metrics.

    Raises:
        ValueError: a name is unknown.
    """
    for name in names:
        if name not in FUNCTIONS:
            raise ValueError(f"unknown metric {name!r}; known: {', '.join(FUNCTIONS)}.")
    return {name: float(FUNCTIONS[name](references, predictions)) for name in names}


def paired_interval(
    name: str,
    predictions: Sequence[Sequence[float]],
    control: Sequence[Sequence[float]],
    references: Sequence[float],
    samples: int = 1000,
    block: int = 1,
) -> tuple[float, float, float]:
    """The difference to the control with its 95 % interval: mean, low, high.

    A bootstrap over the held-out rows gives the interval. Each sample takes the same rows of both models.

    Args:
        name: name of the metric.
        predictions: one list per seed, in the order of the rows of `references`. The difference is a mean over seeds.
        control: likewise, for the control.
        references: the true value of each row.
        samples: number of bootstrap samples, whose 2.5th and 97.5th percentiles end the interval. The seed is fixed.
        block: number of neighbouring rows that are drawn together (the moving-block bootstrap), for data whose
            neighbouring rows are similar.

    Raises:
        ValueError: the lists differ in length, or there are fewer than 2 block - 1 rows: all draws would be one block.
    """
    function = FUNCTIONS[name]
    truth = np.asarray(references)
    ours, theirs = np.asarray(predictions), np.asarray(control)

    def difference(rows: Any) -> float:
        by_seed = []
        for converted, stock in zip(ours, theirs, strict=True):
            by_seed.append(function(truth[rows], converted[rows]) - function(truth[rows], stock[rows]))
        return float(np.mean(by_seed))

    generator = np.random.default_rng(0)
    if ours.shape != theirs.shape or ours.shape[-1] != len(truth) or len(truth) < 2 * block - 1:
        raise ValueError(
            f"{ours.shape}, {theirs.shape} and {truth.shape} are no lists of the same rows, in blocks of {block}."
        )
    blocks = -(-len(truth) // block)  # rounded up
    inside = np.arange(block)

    def rows() -> Any:
        starts = generator.integers(0, len(truth) - block + 1, blocks)
        return (starts[:, None] + inside).ravel()[: len(truth)]

    drawn = [difference(rows()) for _ in range(samples)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return difference(slice(None)), float(low), float(high)
