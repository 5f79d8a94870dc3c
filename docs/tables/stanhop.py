"""The tables of STanHop-Net on ETTh1, made from what `recipes/stanhop.py` wrote."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from hf_attn_swap.text.table import markdown

FIGURES = Path(__file__).parents[2] / "recipes" / "figures"
CONTROL = "softmax"
OF_TABLE_1 = ("outeffhop", "clipped_softmax", "outeffhop+clipped_softmax", "gated", "outeffhop+gated")
OF_TABLE_2 = ("sparsemax", "generalized_sparse", "outeffhop")


def studies() -> list[dict[str, Any]]:
    """The records, by horizon."""
    results = [json.loads(path.read_text("utf-8")) for path in FIGURES.glob("stanhop-*.json")]
    return sorted(results, key=lambda study: int(study["options"]["horizon"]))


def stanhop_table() -> str:
    """One row per horizon and retrieval: the mean of the seeds, and the difference to softmax with its interval."""
    rows = []
    for study in studies():
        for name in _retrievals(study):
            cells = [f"{_mean(study, name, 'mae'):.3f}"]
            for figure in ("mse", "w8a8", "kurtosis", "max_inf_norm"):
                cells.append(f"{_mean(study, name, figure):.3f}{_difference(study, name, figure)}")
            start = (str(study["options"]["horizon"]), f"`{name}`", str(len(_runs(study, name))))
            rows.append((*start, cells[1], cells[0], *cells[2:]))
    return markdown(("hours", "retrieval", "seeds", "MSE", "MAE", "MSE in 8 bits", "kurtosis", "largest"), rows)


def simple_table() -> str:
    """MSE and MAE of forecasts without a model."""
    rows = []
    for study in studies():
        for name, (squared, absolute) in study["simple"].items():
            rows.append((str(study["options"]["horizon"]), name, f"{squared:.3f}", f"{absolute:.3f}"))
    return markdown(("hours", "forecast", "MSE", "MAE"), rows)


def found_in_table_1() -> str:
    """What was measured of Table 1's last block, in words; * as the page of claims says."""
    return _found(OF_TABLE_1, ("kurtosis", "max_inf_norm", "mse", "w8a8"))


def found_in_table_2() -> str:
    """What was measured of Table 2, in words; * as the page of claims says."""
    return _found(OF_TABLE_2, ("mse", "kurtosis", "max_inf_norm"))


def measured_size() -> str:
    """The size and budget of the runs at the shortest horizon, and their seeds."""
    study = studies()[0]
    options, seeds = study["options"], len(_runs(study, CONTROL))
    return (
        f"{study['parameters']:,} parameters, width {options['width']}, {options['layers'] + 1} decoder layers, "
        f"{options['steps']} steps of {options['batch']} windows, {seeds} seed{'s' * (seeds > 1)}"
    )


def _found(names: tuple[str, ...], figures: tuple[str, ...]) -> str:
    study = studies()[0]
    parts = []
    for name in (CONTROL, *names):
        values = (
            f"{_mean(study, name, figure):.3f}{' *' if _clear(study, name, figure) else ''}" for figure in figures
        )
        parts.append(f"{name if name == CONTROL else f'`{name}`'} {' / '.join(values)}")
    return "; ".join(parts)


def _retrievals(study: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(key.rpartition("/")[0] for key in study["runs"]))


def _runs(study: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [run for key, run in study["runs"].items() if key.rpartition("/")[0] == name]


def _mean(study: dict[str, Any], name: str, figure: str) -> float:
    return statistics.mean(run[figure] for run in _runs(study, name))


def _difference(study: dict[str, Any], name: str, figure: str) -> str:
    """The difference to softmax with its interval, and * if it is clear; empty for softmax."""
    result = study["compared"].get(name, {}).get(figure, {}).get("difference")
    if result is None:
        return ""
    mean, low, high = result
    return f" {mean:+.3f} [{low:+.3f}, {high:+.3f}]{' *' if _clear(study, name, figure) else ''}"


def _clear(study: dict[str, Any], name: str, figure: str) -> bool:
    """The interval leaves 0 out, and all seeds, of which there are several, agree on the sign."""
    result = study["compared"].get(name, {}).get(figure)
    if result is None or result["difference"] is None or len(_runs(study, name)) < 2:
        return False
    _, low, high = result["difference"]
    return bool(result["agree"]) and not low <= 0 <= high
