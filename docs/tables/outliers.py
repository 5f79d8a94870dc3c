"""The tables of outliers over three seeds: of models from random weights, and of a fine-tuning under a penalty."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_attn_swap.text.table import markdown

FIGURES = Path(__file__).parents[2] / "recipes" / "figures"


def scratch_outliers_table() -> str:
    """A row per model and attention of every file that holds the cells of `recipes/table_1.py`."""
    lines = []
    for path in sorted(FIGURES.glob("table-1-*.json")):
        cells = json.loads(path.read_text("utf-8"))
        for model, arm in dict.fromkeys((cell["model"], cell["arm"]) for cell in cells):
            seeds = [cell for cell in cells if (cell["model"], cell["arm"]) == (model, arm)]
            digits = {"kurtosis": 2, "max_inf_norm": 2, "full": 3, "w8a8": 3}
            figures = [_spread([cell[name] for cell in seeds], count) for name, count in digits.items()]
            lost = _spread([100 * (cell["w8a8"] / cell["full"] - 1) for cell in seeds], 3)
            lines.append((model, f"`{arm}`", *figures, lost, str(len(seeds))))
    figures_of = ("kurtosis", "largest activation", "full precision", "8 bits", "8 bits above full, %")
    return markdown(("model", "attention", *figures_of, "seeds"), lines)


def penalty_table() -> str:
    """A row per model, without and with the penalty: the means of the seeds that `recipes/outliers.py` measured."""
    studies: list[dict[str, Any]] = json.loads((FIGURES / "outlier-penalty.json").read_text("utf-8"))
    lines = []
    for model in dict.fromkeys(study["model"] for study in studies):
        of_model = [study["runs"] for study in studies if study["model"] == model]
        for name, words in (("plain", "none"), ("penalty", "1")):
            seeds = [runs[name] for runs in of_model]
            lost = {key: [100 * (row[key] - row["accuracy"]) for row in seeds] for key in ("fake_w8a8", "int8_dynamic")}
            figures = [[row["max_inf_norm"] for row in seeds], [row["kurtosis"] for row in seeds]]
            figures.append([100 * row["accuracy"] for row in seeds])
            cells = [_spread(values, 1) for values in (*figures, *lost.values())]
            lines.append((model.split("/")[-1], words, *cells, str(len(seeds))))
    figures_of = ("largest activation", "kurtosis", "accuracy, %", "papers' 8 bits, points", "integers, points")
    return markdown(("model", "penalty", *figures_of, "seeds"), lines)


def _spread(values: Sequence[float], digits: int) -> str:
    """The mean and the standard deviation of the seeds."""
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {spread:.{digits}f}"
