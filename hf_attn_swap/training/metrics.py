"""Metrics of the recipes as `evaluate.Metric`s over scikit-learn: the Hub's scripts cannot be fetched offline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import datasets
import evaluate
import numpy as np
from scipy.stats import spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

Function = Callable[[Sequence[float], Sequence[float]], float]
FUNCTIONS: dict[str, Function] = {
    # scikit-learn's checks its input for milliseconds, and a bootstrap calls it thousands of times
    "accuracy": lambda references, predictions: float(np.mean(np.equal(references, predictions))),
    "f1": lambda references, predictions: f1_score(
        references, predictions, average="binary" if len(set(references) | set(predictions)) <= 2 else "macro"
    ),
    "matthews_correlation": matthews_corrcoef,
    "spearmanr": lambda references, predictions: spearmanr(references, predictions).statistic,
    "perplexity": lambda _, losses: float(np.exp(np.mean(losses))),
    "mse": lambda _, losses: float(np.mean(losses)),
}
OUTLIERS = ("kurtosis", "max_inf_norm")
LOWER_IS_BETTER = ("perplexity", "mse", "mae", *OUTLIERS)
DESCRIPTION = "{} of predictions against references, by NumPy, scikit-learn or SciPy; perplexity and mse take losses."


class Score(evaluate.Metric):  # type: ignore[misc]  # evaluate carries no types
    """One of `FUNCTIONS` by name.

    Args:
        name: "accuracy", "f1", "matthews_correlation", "spearmanr", "perplexity" or "mse".

    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, name: str, **kwargs: Any) -> None:
        if name not in FUNCTIONS:
            raise ValueError(f"unknown metric {name!r}; known: {', '.join(FUNCTIONS)}.")
        self.score = name
        super().__init__(config_name=name, **kwargs)

    def _info(self) -> evaluate.MetricInfo:
        kind = datasets.Value("float64")
        return evaluate.MetricInfo(
            description=DESCRIPTION.format(self.score),
            citation="",
            inputs_description="predictions and references: one number per row.",
            features=datasets.Features({"predictions": kind, "references": kind}),
        )

    def _compute(self, predictions: Sequence[float], references: Sequence[float], **_: Any) -> dict[str, float]:
        return {self.score: float(FUNCTIONS[self.score](references, predictions))}


def scores(names: Sequence[str], predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
    """Every named metric.

    Raises:
        ValueError: an unknown name.
    """
    found: dict[str, float] = {}
    for name in names:
        found |= Score(name).compute(predictions=predictions, references=references)
    return found


def paired_interval(
    name: str,
    predictions: Sequence[Sequence[float]],
    control: Sequence[Sequence[float]],
    references: Sequence[float],
    samples: int = 1000,
    block: int = 1,
) -> tuple[float, float, float]:
    """Difference to the control and its 95 % interval, by a paired bootstrap over the held-out rows.

    Args:
        name: of the metric.
        predictions: one list per seed, row by row as `references`; the difference is the mean over seeds.
        control: likewise.
        references: the truth.
        samples: of the bootstrap (percentiles; seeded).
        block: neighbouring rows that are drawn together, where neighbours are alike (the moving-block bootstrap).

    Raises:
        ValueError: lists of different lengths, or fewer rows than two blocks.
    """
    function = FUNCTIONS[name]
    truth = np.asarray(references)
    ours, theirs = np.asarray(predictions), np.asarray(control)

    def difference(rows: Any) -> float:
        pairs = ((mine[rows], other[rows]) for mine, other in zip(ours, theirs, strict=True))
        return float(np.mean([function(truth[rows], mine) - function(truth[rows], other) for mine, other in pairs]))

    generator = np.random.default_rng(0)
    if ours.shape != theirs.shape or ours.shape[-1] != len(truth) or len(truth) < 2 * block - 1:
        raise ValueError(
            f"{ours.shape}, {theirs.shape} and {truth.shape} are no lists of the same rows, in blocks of {block}."
        )
    blocks, inside = -(-len(truth) // block), np.arange(block)

    def rows() -> Any:
        starts = generator.integers(0, len(truth) - block + 1, blocks)
        return (starts[:, None] + inside).ravel()[: len(truth)]

    drawn = [difference(rows()) for _ in range(samples)]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return difference(slice(None)), float(low), float(high)
