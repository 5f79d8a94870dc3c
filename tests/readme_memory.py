"""README's tables of Hopfield memories, made from what the two recipes wrote under `recipes/figures`."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "recipes" / "figures"
SHOWN = {
    ("size", 100.0): "half of 100",
    ("size", 500.0): "half of 500",
    ("noise", 0.3): "100, noise 0.3",
    ("steps", 10.0): "half of 100, 10 steps",
}


def recall_table() -> str:
    """Images recalled, percent and the spread of the draws, from `recipes/memory.py`."""
    studies = [json.loads(path.read_text("utf-8")) for path in sorted(FIGURES.glob("memory-*.json"))]
    names = studies[0]["options"]["normalizers"]
    lines = [f"| images | β | asked for | {' | '.join(names)} |", "|---|---|---|" + "---|" * len(names)]
    for study in sorted(studies, key=lambda each: (each["options"]["dataset"], each["options"]["beta"])):
        options = study["options"]
        for (sweep, value), asked in SHOWN.items():
            found = [row["success"] for row in study["rows"] if (row["sweep"], row["value"]) == (sweep, value)]
            lines.append(f"| {options['dataset']} | {options['beta']:g} | {asked} | {_cells(found)} |")
    return "\n".join(lines)


def bags_table() -> str:
    """Accuracy on new bags, percent and the spread of the seeds, from `recipes/multiple_instance.py`."""
    study = json.loads((FIGURES / "multiple_instance.json").read_text("utf-8"))
    names = study["options"]["normalizers"]
    lines = [f"| bags | {' | '.join(names)} |", "|---|" + "---|" * len(names)]
    kinds: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in study["rows"]:
        kinds.setdefault((row["task"], row["bag_size"]), []).append(row)
    for (task, size), rows in kinds.items():
        lines.append(f"| {task}, {size} per bag | {_cells([row['accuracy'] for row in rows])} |")
    return "\n".join(lines)


def _cells(found: list[list[float]]) -> str:
    return " | ".join(f"{100 * statistics.mean(each):.1f} ± {100 * statistics.stdev(each):.1f}" for each in found)
