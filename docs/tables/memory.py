"""The tables of Hopfield memories, made from what the two recipes wrote under `recipes/figures`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from hf_attn_swap.text.table import markdown

FIGURES = Path(__file__).parents[2] / "recipes" / "figures"
SHOWN = {
    ("size", 10.0): "upper half, 10 stored",
    ("size", 100.0): "upper half, 100 stored",
    ("size", 500.0): "upper half, 500 stored",
    ("noise", 0.3): "noise 0.3, 100 stored",
    ("steps", 10.0): "upper half, 100 stored, 10 steps",
}


def recall_table() -> str:
    """Shares within the threshold / nearest to what was asked for, in percent, from `recipes/memory.py`."""
    studies = [json.loads(path.read_text("utf-8")) for path in sorted(FIGURES.glob("memory-*.json"))]
    names = [*studies[0]["options"]["normalizers"], "mean image"]
    lines = []
    for study in sorted(studies, key=lambda each: (each["options"]["dataset"], each["options"]["beta"])):
        options = study["options"]
        for (sweep, value), asked in SHOWN.items():
            rows = (row for row in study["rows"] if (row["sweep"], row["value"]) == (sweep, value))
            by_name = {row["normalizer"]: (row["success"], row["nearest"]) for row in rows}
            cells = (" / ".join(_figure(each, 0) for each in by_name[name]) for name in names)
            lines.append((options["dataset"], f"{options['beta']:g}", asked, *cells))
    return markdown(("images", "β", "asked for", *names), lines)


def bags_table() -> str:
    """Accuracy on new bags, percent and the standard deviation of the seeds, from `recipes/multiple_instance.py`."""
    study = json.loads((FIGURES / "multiple_instance.json").read_text("utf-8"))
    names = study["options"]["normalizers"]
    lines = []
    by_name = {(row["task"], row["bag_size"], row["normalizer"]): row["accuracy"] for row in study["rows"]}
    for task, size in dict.fromkeys(key[:2] for key in by_name):
        lines.append((f"{task}, {size} per bag", *(_figure(by_name[task, size, name], 1) for name in names)))
    return markdown(("bags", *names), lines)


def _figure(values: list[float], digits: int) -> str:
    return f"{100 * statistics.mean(values):.{digits}f} ± {100 * statistics.stdev(values):.{digits}f}"
