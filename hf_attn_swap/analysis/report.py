"""A report that compares a model with and without its swap on the same rows, as an HTML page and as JSON."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from ..describe import Description
from ..measuring.lost import Lost, position_table
from ..publish.results import versions
from ..text.table import Table
from . import plots
from .inputs import Inputs
from .recording import Recording

TEMPLATE = Path(__file__).with_name("report.html.jinja")
PAGE, FIGURES = "report.html", "report.json"
UNSWAPPED, SWAPPED = "unswapped", "swapped"  # the columns of the loss by position
SUMMARY = (
    ("kurtosis", "Kurtosis of activations, mean over modules (3 is a normal distribution)"),
    ("max_inf_norm", "Largest activation, maximum over modules"),
    ("similarity_first", "Token similarity after the first layer"),
    ("similarity_last", "Token similarity after the last layer (1: all tokens are one)"),
    ("entropy", "Attention entropy in nats, mean over layers and heads"),
    ("sinks", "Attention on the first token and separators, mean over layers and heads"),
)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The recordings of both attentions on the same rows.

    Attributes:
        title: the names of the variant and the model.
        data: name of the data set.
        lost: what the swap cost on the rows; None if there is no stock model to compare with.
        description: which layers run which variant.
        recordings: recordings by label, the unswapped model first. The unswapped model is missing if a calibration was
            merged into its weights.
        inputs: the rows.
        notes: sentences that a reader of the report should know.
    """

    title: str
    data: str
    lost: Lost | None
    description: Description
    recordings: dict[str, Recording]
    inputs: Inputs
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All measurements as plain data for JSON."""
        return {
            "title": self.title,
            "data": self.data,
            "rows": self.inputs.rows,
            "versions": versions(),
            "notes": list(self.notes),
            "swap": self.description.to_dict(),
            "lost": None if self.lost is None else self.lost.to_dict(),
            "summary": {label: recording.summary() for label, recording in self.recordings.items()},
            "recordings": {label: recording.to_dict() for label, recording in self.recordings.items()},
        }

    def figures(self) -> Iterator[tuple[str, str, Figure]]:
        """For each picture: the heading, a sentence that says how to read the picture, and the picture."""
        drawings = {
            "Token similarity": plots.similarity,
            "Attention entropy": plots.entropy,
            "Sink tokens": plots.sinks,
            "Outliers": plots.outliers,
        }
        layers = [layer for recording in self.recordings.values() for layer in recording.layers.values()]
        if any(layer.update_norm.total is not None for layer in layers):
            drawings["The update"] = plots.updates
        for heading, draw in drawings.items():
            yield heading, draw.__doc__ or "", draw(self.recordings)

    def html(self) -> str:
        """The report as one HTML page that needs no network and no other file."""
        environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
        pictures = [(heading, words, _png(figure)) for heading, words, figure in self.figures()]
        summaries = {label: recording.summary() for label, recording in self.recordings.items()}
        rows = [(words, [_number(values[name]) for values in summaries.values()]) for name, words in SUMMARY]
        by_place = zip(*(recording.in_order for recording in self.recordings.values()), strict=True)
        largest = [[layer.largest.of(self.inputs.words) for layer in layers] for layers in by_place]
        return template.render(
            report=self,
            positions=self._positions(),
            labels=list(summaries),
            rows=rows,
            largest=largest,
            pictures=pictures,
            versions=versions(),
            table=self.description,
        )

    def _positions(self) -> Table | None:
        """The loss by position; None for a model without it, and where all rows are short."""
        bins = () if self.lost is None else self.lost.by_position
        return position_table(bins, (UNSWAPPED, SWAPPED)) if len(bins) > 1 else None

    def save(self, folder: Path) -> Path:
        """Write report.html and report.json into a folder, and return the path of the page."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.to_dict(), indent=1, allow_nan=False)
        (folder / FIGURES).write_text(text + "\n", encoding="utf-8")
        (folder / PAGE).write_text(self.html(), encoding="utf-8")
        return folder / PAGE


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    return base64.b64encode(buffer.getvalue()).decode()
