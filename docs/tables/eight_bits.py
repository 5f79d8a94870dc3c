"""The tables of 8 bits, made from what `recipes/eight_bits.py` wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hf_attn_swap.text.table import markdown

RECORDS = Path(__file__).parents[2] / "recipes" / "figures"
PROTOCOLS = {"machine": "machines", "papers": "papers"}
STATES = ("stock", "smoothed", "sink", "sink, smoothed", "rotated", "rotated, sink")
TRAINED = ("sink, smoothed, trained", "sink, trained")  # a study has one of the two
FULL = ("stock, full precision", "sink, full precision")


def eight_bits_table(metric: str, paths: Iterable[Path] | None = None) -> str:
    """A row for each file that was measured: the metric in full precision, and what 8 bits cost in each state.

    A state that no model of the table has is left out.

    Args:
        metric: "accuracy" or "perplexity": the studies in the table.
        paths: the records; None means all.
    """
    rows = []
    for study in _studies(paths):
        for text, (value, *_) in study["runs"][FULL[0]]["figures"].items() if study["metric"] == metric else ():
            accuracy = metric == "accuracy"
            stock = f"{100 * value:.1f}" if accuracy else f"{value:.2f}"
            last = [state for state in TRAINED if f"{state}, 8 bits" in study["runs"]] or TRAINED[:1]
            runs = (study["runs"].get(f"{state}, 8 bits") for state in (*STATES, last[0]))
            cells = ("–" if run is None else _cost(run["figures"][text], accuracy) for run in runs)
            rows.append((study["name"], text, PROTOCOLS[study["protocol"]], stock, *cells))
    columns = list(zip(("model", "text", "as", "full precision", *STATES, "trained"), *rows, strict=True))
    header, *kept = zip(*(column for column in columns if set(column[1:]) != {"–"}), strict=True)
    return markdown(header, kept)


def largest_table(paths: Iterable[Path] | None = None) -> str:
    """A row for each model and its texts: the largest number that a norm reads in full precision, and its token."""
    rows = {}
    for study in _studies(paths):
        runs = [study["runs"].get(state) for state in FULL]
        texts = tuple(study["runs"][FULL[0]]["figures"])
        rows[study["name"], texts] = [study["name"], ", ".join(texts), *map(_largest, runs)]
    return markdown(("model", "texts", "stock", "sink"), list(rows.values()))


def _studies(paths: Iterable[Path] | None) -> list[dict[str, Any]]:
    result = sorted(RECORDS.glob("eight-bits-*.json")) if paths is None else paths
    return [json.loads(path.read_text("utf-8")) for path in result]


def _cost(figures: Sequence[float], accuracy: bool) -> str:
    """The difference of two accuracies in points, or the ratio of two perplexities, with the interval."""
    _, mean, low, high = figures
    if accuracy:
        return f"{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    return f"{_ratio(mean)} ({_ratio(low)}–{_ratio(high)})"


def _ratio(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:,.0f}"


def _largest(run: dict[str, Any] | None) -> str:
    if run is None:
        return "–"
    result = run["largest"]
    value = f"{result['value']:,.0f}" if result["value"] >= 100 else f"{result['value']:.3g}"
    word = "" if result["word"] is None else f" `{result['word']!r}`"
    number = re.search(r"\d.*", result["norm"])  # without the names in front of the number of the block
    norm = result["norm"].rpartition(".")[-1] if number is None else number[0]
    return f"{value}, token {result['place']}{word}, `{norm}`"
