"""The demo's table, with one row per model, and the sentences that say what the table can and cannot show."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rich.table import Table

from ..training import Outcome
from ..training.metrics import paired_interval
from .measure import ratio, wilson_interval
from .options import CONTROL


@dataclass(frozen=True)
class Row:
    """The measurements of one model.

    Shares are in [0, 1]. Differences are against the control, on the same sentences.
    """

    variant: str
    accuracy: float
    accuracy_95: tuple[float, float]
    difference: float
    difference_95: tuple[float, float]
    train_step_ms: float
    time_ratio: float
    parameters_added: int
    kurtosis: float
    max_inf_norm: float
    wall_seconds: float


def make_rows(outcomes: dict[str, Outcome], times: dict[str, list[float]]) -> list[Row]:
    """Put the measurements of each model into its row."""
    rows = []
    control = outcomes[CONTROL]
    for name, outcome in outcomes.items():
        truth, predicted = outcome.references, outcome.predictions
        mean, low, high = paired_interval("accuracy", [predicted], [control.predictions], truth)
        right = sum(ours == true for ours, true in zip(predicted, truth, strict=True))
        rows.append(
            Row(
                variant=name,
                accuracy=outcome.metrics["accuracy"],
                accuracy_95=wilson_interval(right, len(truth)),
                difference=mean,
                difference_95=(low, high),
                train_step_ms=median(times[name]),
                time_ratio=ratio(times[name], times[CONTROL]),
                parameters_added=outcome.parameters_added,
                kurtosis=outcome.metrics["kurtosis"],
                max_inf_norm=outcome.metrics["max_inf_norm"],
                wall_seconds=outcome.wall_seconds,
            )
        )
    return rows


def best_converted(rows: Sequence[Row]) -> Row:
    """The converted model with the highest accuracy; the first of several equal ones."""
    return max((row for row in rows if row.variant != CONTROL), key=lambda row: row.accuracy)


def make_table(rows: Sequence[Row], title: str) -> Table:
    """The table that the demo prints. It fits into 80 columns."""
    table = Table(title=title, box=None, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for heading in ("variant", "accuracy [95 %]", "vs control", "ms/batch", "added", "kurtosis", "max|a|"):
        table.add_column(heading, justify="left" if heading == "variant" else "right", no_wrap=heading != "variant")
    for row in rows:
        low, high = (100 * x for x in row.accuracy_95)
        half = 50 * (row.difference_95[1] - row.difference_95[0])
        control = row.variant == CONTROL
        table.add_row(
            row.variant,
            f"{100 * row.accuracy:.1f} [{low:.1f}, {high:.1f}]",
            "(control)" if control else f"{100 * row.difference:+.1f} ±{half:.1f}",
            f"{row.train_step_ms:.0f} x{row.time_ratio:.2f}",
            f"{row.parameters_added:,}",
            f"{row.kurtosis:.1f}",
            f"{row.max_inf_norm:.1f}",
        )
    return table


def reading(rows: Sequence[Row], test_size: int) -> list[str]:
    """Sentences that say how to read the table: the meaning of the columns, and the limits of a single seed."""
    clear = [row for row in rows if row.difference_95[0] > 0 or row.difference_95[1] < 0]
    verdict = (
        "This run tells from the control: "
        + ", ".join(f"{row.variant} ({100 * row.difference:+.1f} points)" for row in clear)
        + "."
        if clear
        else "This run tells none of the variants from the control: every interval of a difference holds 0."
    )
    lines = [
        "vs control: points of accuracy on the same sentences, with the 95 % interval; ms/batch: forward and backward "
        "of one held-out batch, the models taking turns, and the ratio to the control; added: parameters; kurtosis "
        "(normal: 3) and max|a| (largest infinity norm) are of the layer outputs, padding left out.",
        f"The intervals cover the choice of the {test_size} test sentences and nothing else. {verdict}",
        "It is one seed, one small training set and one learning rate, tuned for none of the models. Another seed "
        "draws other sentences, another head and another order, which the intervals leave out: small differences here "
        "rank nothing, and short sentences say nothing of the speed at long ones.",
    ]
    if any(row.variant.startswith("simple") and row.difference_95[1] < 0 for row in rows):
        lines.append(
            "simple* has no normaliser: on pretrained weights its output is far larger than that of softmax attention, "
            "and so short a fine-tune does not recover from it."
        )
    return lines


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows as plain data."""
    return [asdict(row) for row in rows]
