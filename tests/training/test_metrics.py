"""The bundled metrics against hand-computed cases, and the paired interval against a known spread."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.stats import bootstrap

from hf_attn_swap.training.metrics import paired_interval, scores


@pytest.mark.parametrize(
    ("name", "predictions", "references", "wanted"),
    [
        ("accuracy", [0, 1, 1, 2], [0, 1, 2, 2], 3 / 4),
        ("f1", [1, 1, 0, 0], [1, 0, 1, 0], 1 / 2),
        ("f1", [0, 1, 2, 2], [0, 1, 2, 1], (1 + 2 / 3 + 2 / 3) / 3),
        ("matthews_correlation", [1, 1, 0, 0], [1, 0, 0, 0], 1 / math.sqrt(3)),
        ("spearmanr", [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0], 0.8),
        ("spearmanr", [1.0, 2.0, 3.0], [5.0, 5.0, 5.0], 0.0),
        ("pearsonr", [1.0, 2.0, 6.0], [0.0, 1.0, 5.0], 1.0),
        ("pearsonr", [1.0, 2.0, 6.0], [5.0, 5.0, 5.0], 0.0),
        ("perplexity", [math.log(2), math.log(8)], [0, 0], 4.0),
    ],
)
def test_by_hand(name: str, predictions: list[float], references: list[float], wanted: float) -> None:
    assert scores([name], predictions, references) == {name: pytest.approx(wanted)}


def test_unknown() -> None:
    with pytest.raises(ValueError, match=r"unknown metric 'bleu'; known: accuracy"):
        scores(["bleu"], [0.0], [0.0])


def test_paired_interval() -> None:
    """Ten of a hundred rows are lost by one model alone: -0.1 with the normal interval of a paired difference."""
    references = [1.0] * 100
    control, ours = [1.0] * 100, [1.0] * 90 + [0.0] * 10
    mean, low, high = paired_interval("accuracy", [ours], [control], references)
    half = 1.96 * float(np.std([0.0] * 90 + [1.0] * 10)) / 10
    assert mean == pytest.approx(-0.1)
    assert (low, high) == (pytest.approx(-0.1 - half, abs=0.01), pytest.approx(-0.1 + half, abs=0.01))
    assert paired_interval("accuracy", [control], [control], references) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("seeds", [1, 2])
def test_models_that_err_on_the_same_rows_are_compared_row_by_row(seeds: int) -> None:
    """Both miss 120 of 400 rows, and then one row of twenty goes either way: the spread is that of these few rows.

    Two samples drawn apart would have a spread of sqrt(2 p (1 - p)) per row, three times as much.
    """
    generator = np.random.default_rng(1)
    right = np.ones(400)
    right[:120] = 0
    generator.shuffle(right)
    ours, control = right.copy(), right.copy()
    ours[:10], ours[10:20] = 1, 0
    control[:10], control[10:20] = 0, 1
    by_row = ours - control
    mean, low, high = paired_interval("accuracy", [ours] * seeds, [control] * seeds, np.ones(400))
    half = 1.96 * float(by_row.std()) / 20
    assert mean == pytest.approx(float(by_row.mean()))
    assert high - mean == pytest.approx(half, rel=0.15)
    assert mean - low == pytest.approx(half, rel=0.15)
    apart = 1.96 * float(np.sqrt(ours.var() + control.var())) / 20
    assert high - low < 0.5 * 2 * apart


def test_seeds_share_the_rows_of_a_draw() -> None:
    """Seeds whose predictions are the same narrow nothing; the difference is the mean over seeds, not of one."""
    generator = np.random.default_rng(2)
    references = np.ones(300)
    ours, control = (generator.random((2, 300)) < share for share in (0.7, 0.6))
    ours, control = ours.astype(float), control.astype(float)
    mean, _, _ = paired_interval("accuracy", ours, control, references)
    assert mean == pytest.approx(float(ours.mean() - control.mean()))
    one, twice = (paired_interval("accuracy", [ours[0]] * n, [control[0]] * n, references) for n in (1, 2))
    assert one == pytest.approx(twice)


def test_neighbours_that_are_alike_widen_the_interval() -> None:
    """Losses that are equal within each ten rows are a tenth as many: the interval is about sqrt(10) times as wide."""
    losses = np.repeat(np.random.default_rng(0).normal(size=100), 10).tolist()
    zeros = [0.0] * 1000
    widths = []
    for block in (1, 10):
        mean, low, high = paired_interval("mse", [losses], [zeros], zeros, block=block)
        assert mean == pytest.approx(float(np.mean(losses)))
        widths.append(high - low)
    assert widths[1] == pytest.approx(10**0.5 * widths[0], rel=0.15)
    for wrong, block in ((losses[:-1], 1), (losses, 600)):
        with pytest.raises(ValueError, match="no lists of the same rows"):
            paired_interval("mse", [wrong], [zeros], zeros, block=block)


def test_an_interval_of_single_rows_is_that_of_scipy() -> None:
    generator = np.random.default_rng(5)
    truth, ours, control = (generator.integers(0, 2, size) for size in (200, (2, 200), (2, 200)))

    def difference(rows: Any) -> float:
        return float(np.mean((ours[:, rows] == truth[rows]).mean(1) - (control[:, rows] == truth[rows]).mean(1)))

    options = {"n_resamples": 1000, "method": "percentile", "vectorized": False, "rng": np.random.default_rng(0)}
    wanted = bootstrap((np.arange(200),), difference, **options).confidence_interval
    _, low, high = paired_interval("accuracy", ours.tolist(), control.tolist(), truth.tolist())
    assert (low, high) == pytest.approx((wanted.low, wanted.high), abs=1e-12)


def test_an_interval_is_the_percentiles_of_literal_draws() -> None:
    """Blocks of neighbouring rows, rounded up and cut to the number of rows; 1,000 draws where nothing is said."""
    numbers = np.random.default_rng(1).normal(size=(3, 40))
    truth, ours, control = numbers[0], [numbers[1].tolist()], [numbers[2].tolist()]
    gain = numbers[1] - numbers[2]  # "mse" takes the loss of each row
    generator, drawn = np.random.default_rng(0), []
    for _ in range(1000):
        rows = [start + step for start in generator.integers(0, 40 - 3 + 1, 14) for step in range(3)][:40]
        drawn.append(gain[rows].mean())
    mean, low, high = paired_interval("mse", ours, control, truth.tolist(), block=3)
    assert mean == pytest.approx(gain.mean())
    assert (low, high) == pytest.approx(tuple(np.percentile(drawn, [2.5, 97.5])))


def test_rows_that_an_interval_needs() -> None:
    """Two blocks that may share one row; as many rows and seeds in the control."""
    rows = [[0, 1, 0, 1, 1]]
    paired_interval("accuracy", rows, rows, rows[0], samples=2, block=3)
    for ours, control, truth, block in (
        (rows, rows, rows[0], 4),
        ([rows[0][:4]], [rows[0][:4]], rows[0][:4], 3),
        (rows, [rows[0][:4]], rows[0], 1),
        (rows * 2, rows, rows[0], 1),
        (rows, rows, rows[0][:4], 1),
    ):
        with pytest.raises(ValueError, match="no lists of the same rows"):
            paired_interval("accuracy", ours, control, truth, samples=2, block=block)
