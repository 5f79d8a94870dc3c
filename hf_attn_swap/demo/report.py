"""The demo's table, with one row per attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..conversion.report import ConversionReport
from ..text.table import Table
from ..training import Outcome
from ..training.metrics import paired_interval, scores

HEADER = ("attention", "as patched", "converted", "control", "difference [95 %]", "layers")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measurements of one attention on the held-out sentences. Accuracies are shares, from 0 to 1.

    Attributes:
        variant: the name of the attention.
        patched: accuracy with the attention in all layers, before anything is fitted.
        converted: accuracy of the converted model.
        control: accuracy of the fine-tuned model with its own attention.
        difference: converted minus control.
        difference_95: the ends of its 95 % interval, paired over the held-out sentences.
        layers: the number of layers that run the attention after the conversion.
        of_layers: the number of layers of the model.
        seconds: the time of the conversion.
    """

    variant: str
    patched: float
    converted: float
    control: float
    difference: float
    difference_95: tuple[float, float]
    layers: int
    of_layers: int
    seconds: float

    def cells(self) -> tuple[str, ...]:
        """The row of the table, in the order of `HEADER`; shares in per cent."""
        low, high = (100 * end for end in self.difference_95)
        accuracies = (f"{100 * share:.1f}" for share in (self.patched, self.converted, self.control))
        difference = f"{100 * self.difference:+.1f} [{low:+.1f}, {high:+.1f}]"
        return (self.variant, *accuracies, difference, f"{self.layers} of {self.of_layers}")


def make_row(patched: Tensor, converted: Tensor, control: Outcome, report: ConversionReport, seconds: float) -> Row:
    """Compare a converted model with the control.

    Args:
        patched: the logits (rows, classes) before the conversion.
        converted: the logits after the conversion.
        control: the control, with its predictions for the same rows in the same order.
        report: of the conversion.
        seconds: the time of the conversion.
    """
    truth, ours = control.references, converted.argmax(-1).tolist()
    mean, low, high = paired_interval("accuracy", [ours], [control.predictions], truth)
    return Row(
        variant=report.variant,
        patched=scores(["accuracy"], patched.argmax(-1).tolist(), truth)["accuracy"],
        converted=scores(["accuracy"], ours, truth)["accuracy"],
        control=control.metrics["accuracy"],
        difference=mean,
        difference_95=(low, high),
        layers=len(report.layers),
        of_layers=len(report.layers) + len(report.kept),
        seconds=seconds,
    )


def make_table(rows: Sequence[Row], summary: str) -> Table:
    """The table that the demo prints. It fits into 80 columns."""
    return Table(summary=summary, header=HEADER, rows=[row.cells() for row in rows])
