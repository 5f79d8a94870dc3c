"""The tables of SimpleTRON's blocks: the arms of its Figures 3 and 5, and its depth series."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.text.table import markdown

RECORD = Path(__file__).parents[2] / "recipes" / "figures" / "deviation-ag-news.json"
ARMS = {
    "softmax": "softmax",
    "simpletron_resl:skip=block": "linear, with W_o",
    "simpletron": "linear, without W_o",
    "simpletron_resl": "linear, with W_o and the skip",
}
SERIES = "bert-scratch-{}-layers-ag-news-simpletron-resl"
# The paper's accuracies by number of blocks, from scratch: BERT and SimpleTRON.
PAPER = {
    1: (89.12, 90.90),
    2: (90.38, 90.32),
    3: (90.28, 90.44),
    4: (90.66, 90.41),
    5: (90.11, 90.35),
    6: (90.30, 90.22),
    7: (90.68, 90.19),
    8: (90.68, 89.98),
    9: (91.13, 89.95),
    10: (91.21, 89.94),
    11: (90.78, 89.43),
    12: (90.10, 89.90),
}


def arms() -> list[dict[str, Any]]:
    """What `recipes/deviation.py` measured, one entry per arm."""
    found: list[dict[str, Any]] = json.loads(RECORD.read_text("utf-8"))
    return found


def deviation_table() -> str:
    """One row per arm: accuracy, training loss, and the deviations at the end."""
    rows = []
    for each in arms():
        ends = each["products"][-1][1:]
        shown = (f"`{each['arm']}`", ARMS[each["arm"]], f"{100 * each['metrics']['accuracy']:.1f}")
        rows.append((*shown, f"{each['losses'][-1][1]:.3f}", f"{ends[0]:.3g}", f"{ends[-1]:.3g}"))
    return markdown(("attention", "layer", "accuracy", "training loss", "first block", "last block"), rows)


def accuracies() -> str:
    """The accuracies of the arms in words, for the row of Figure 3."""
    return ", ".join(f"`{each['arm']}` {100 * each['metrics']['accuracy']:.1f}" for each in arms())


def deviations() -> str:
    """The deviations of the last block at the end in words, for the row of Figure 5."""
    return "last block: " + ", ".join(f"`{each['arm']}` {each['products'][-1][-1]:.3g}" for each in arms())


def depth_table(runs: Mapping[str, RunResult]) -> str:
    """One row per measured number of blocks, beside the paper's.

    Args:
        runs: the recorded ones, by name.
    """
    rows = []
    for blocks, (bert, simple) in PAPER.items():
        run = runs.get(SERIES.format(blocks))
        if run is not None and run.control is not None:
            ours = (f"{100 * measured.metrics[0].mean:.1f}" for measured in (run.control, run.converted))
            rows.append((str(blocks), *ours, f"{bert:.2f}", f"{simple:.2f}"))
    header = ("blocks", "softmax", "`simpletron_resl`", "the paper: BERT", "the paper: SimpleTRON")
    return markdown(header, rows)
