"""The bundled metrics against hand-computed cases, and the paired interval against a known spread."""

from __future__ import annotations

import math

import numpy as np
import pytest

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
