"""The tables of the documentation, made from what they are about. `docs/hooks.py` puts them into the pages."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from pathlib import Path
from typing import Any

from hf_attn_swap import list_variants
from hf_attn_swap.core.registry import get_variant
from hf_attn_swap.publish.results import RESULTS_FILE, SCRATCH, Metric, RunResult

from .conversions import curve_table, hybrid_table, layers_table
from .memory import bags_table, recall_table
from .papers import claims_table
from .speed import compile_table, decode_table, lra_table, operator_table, speed_table

CARDS = Path(__file__).parents[2] / "model_cards"
FIGURES = Path(__file__).parents[2] / "recipes" / "figures"
MEASURED = Path(__file__).parents[2] / "benchmarks" / "figures"
SHOWN_LAYERS = (1, 2, 3, 4, 8, 12)


def variants_table() -> str:
    """One Markdown row per registered variant."""
    lines = [
        "| name | what changes | formula | options | extra parameters | fused form | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in list_variants():
        cls = get_variant(name)
        options = ", ".join(f"`{field.name}={field.default!r}`" for field in dataclasses.fields(cls.Options))
        cells = (
            f"`{name}`",
            cls.summary,
            f"`{cls.formula}`",
            options or "–",
            cls.parameters_added,
            cls.fused,
            cls.paper,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def conversion_table(variant: str | None = None) -> str:
    """One Markdown row per published run with a paired interval, the best difference first within a data set.

    Args:
        variant: only runs of this variant, alone or in a composition; None means all runs.
    """
    lines = [
        "| run | attention | conversion | metric | converted | control | difference [95 %] | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in published(variant):
        if run.base.relation != SCRATCH:
            lines.append("| " + " | ".join([*_what(run), _steps(run), *_figures(run)]) + " |")
    return "\n".join(lines)


def scratch_table(variant: str | None = None) -> str:
    """The same for models from random weights."""
    lines = [
        "| run | attention | metric | swapped | control | difference [95 %] | seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    found = (run for run in published(variant) if run.base.relation == SCRATCH)
    return "\n".join([*lines, *("| " + " | ".join([*_what(run), *_figures(run)]) + " |" for run in found)])


def published(variant: str | None = None) -> list[RunResult]:
    """All runs with a control, or those of one variant, by study (one model on one data set), the best first."""
    return [run for run in _controlled() if variant is None or variant in _components(run)]


@functools.cache
def _controlled() -> tuple[RunResult, ...]:
    """All runs with a control, in the order of `published`. The records are read once: reading them takes seconds."""
    runs = []
    for path in CARDS.glob(f"*/{RESULTS_FILE}"):
        run = RunResult.load(path)
        if run.name != path.parent.name:
            raise ValueError(f"{path.parent} holds the run {run.name}; a folder has its run's name.")
        if run.control is not None:
            runs.append(run)
    return tuple(sorted(runs, key=lambda run: (_order(run.study or run.name), -_gain(run))))


def _components(run: RunResult) -> set[str]:
    """The names of all variants of a run."""
    return {component.name for swap in run.swaps for component in swap.components}


def _what(run: RunResult) -> list[str]:
    return [f"[{run.name}](model_cards/{run.name}/README.md)", f"`{run.variant}`{_options(run)}"]


def _steps(run: RunResult) -> str:
    """The steps of the conversion."""
    return "not recorded" if run.steps is None else " + ".join(run.steps) or "none"


def _figures(run: RunResult) -> list[str]:
    """Metric, both values, the difference and its interval, and the seeds."""
    assert run.control is not None
    metric, control, interval = run.converted.metrics[0], run.control.metrics[0], run.difference
    unit, digits = (100, 2) if metric.higher_is_better else (1, 4 if metric.name == "mse" else 2)
    bounds = "" if interval is None else f" [{unit * interval.low:+.{digits}f}, {unit * interval.high:+.{digits}f}]"
    return [
        metric.name,
        _figure(metric, unit, digits),
        _figure(control, unit, digits),
        f"{unit * (metric.mean - control.mean):+.{digits}f}{bounds}",
        str(len(run.converted.seeds)),
    ]


def rank_table() -> str:
    """The residual ratio after some layers, for each cell of (alpha, alpha')."""
    rows = json.loads((FIGURES / "rank_collapse.json").read_text("utf-8"))["rows"]
    cells = sorted({(row["alpha"], row["alpha_prime"]) for row in rows})
    lines = [
        "| layer | " + " | ".join(f"α = {a:g}, α′ = {b:g}" for a, b in cells) + " |",
        "|---|" + "---|" * len(cells),
    ]
    for layer in SHOWN_LAYERS:
        found = {(row["alpha"], row["alpha_prime"]): row for row in rows if row["layer"] == layer}
        shown = [f"{found[c]['mean']:.2g} ({found[c]['low']:.2g} to {found[c]['high']:.2g})" for c in cells]
        lines.append(f"| {layer} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def outlier_table() -> str:
    """One row per model of every file that `recipes/outliers.py` wrote."""
    lines = [
        "| model, data | run | kurtosis | largest | metric | 8 bits, static [95 %] | torchao | similarity | entropy |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for path in sorted(FIGURES.glob("outliers-*.json")):
        study = json.loads(path.read_text("utf-8"))
        name, unit = study["metric"], 1 if study["metric"] == "perplexity" else 100
        where = f"{study['model'].split('/')[-1]}, {study['data'].split('/')[-1]}"
        for run, row in study["runs"].items():
            integer = f"{unit * row['int8_dynamic']:.2f}" if "int8_dynamic" in row else "–"
            cells = (
                where,
                f"`{run}`",
                f"{row['kurtosis']:.0f}",
                f"{row['max_inf_norm']:.1f}",
                f"{unit * row[name]:.2f}",
                f"{unit * row['fake_w8a8']:.2f} ({_interval(row['fake_cost'], unit)})",
                integer,
                f"{row['similarity_first']:.2f} to {row['similarity_last']:.2f}",
                f"{row['entropy']:.2f}",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report_table() -> str:
    """One row per model and attention of the summaries of `hf-attn-swap report`, as patched."""
    names = ("similarity_first", "similarity_last", "entropy", "sinks", "max_inf_norm")
    lines = [
        "| model, data | attention | similarity, first layer | last layer | entropy | on sinks | largest activation |",
        "|---|---|---|---|---|---|---|",
    ]
    done: set[tuple[str, str]] = set()
    for path in sorted(FIGURES.glob("report-*.json")):
        study = json.loads(path.read_text("utf-8"))
        for run, row in study["summary"].items():
            if (study["model"], run) not in done:
                done.add((study["model"], run))
                values = " | ".join(f"{row[name]:,.4g}" if row[name] < 1000 else f"{row[name]:,.0f}" for name in names)
                lines.append(f"| {study['model']}, {study['data']} ({study['rows']} rows) | {run} | {values} |")
    return "\n".join(lines)


def cost_table() -> str:
    """Seconds of a simulation against tokens and width."""
    study = json.loads((MEASURED / "dynamics_cost.json").read_text("utf-8"))
    lines = ["| tokens | width | seconds | loop over particles | times faster |", "|---|---|---|---|---|"]
    for row in study["rows"]:
        ratio = row["loop_seconds"] / row["seconds"]
        lines.append(
            f"| {row['tokens']} | {row['width']} | {row['seconds']:.2f} | {row['loop_seconds']:.0f} | {ratio:.0f} |"
        )
    return "\n".join(lines)


TABLES = {
    "variants": variants_table,
    "conversion": conversion_table,
    "scratch": scratch_table,
    "papers": lambda: claims_table({run.name: run for run in published()}),
    "curve": curve_table,
    "layers": layers_table,
    "hybrid": hybrid_table,
    "rank": rank_table,
    "outliers": outlier_table,
    "reports": report_table,
    "dynamics-cost": cost_table,
    "recall": recall_table,
    "bags": bags_table,
    "speed": speed_table,
    "operator": operator_table,
    "lra": lra_table,
    "decode": decode_table,
    "compile": compile_table,
}


def _interval(values: list[float], unit: int) -> str:
    mean, low, high = (unit * value for value in values)
    return f"{mean:+.2f} [{low:+.2f}, {high:+.2f}]"


def _options(run: RunResult) -> str:
    """Options that are not the defaults."""
    changed: dict[str, Any] = {}
    for swap in run.swaps:
        for component in swap.components:
            fields = {field.name: field.default for field in dataclasses.fields(get_variant(component.name).Options)}
            changed |= {name: value for name, value in component.options.items() if fields.get(name) != value}
    return "".join(f", {name} = {value}" for name, value in changed.items())


def _order(name: str) -> list[str]:
    """Sorts names by their letters, and numbers inside them by size: 24 hours before 168."""
    return [part.zfill(9) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


def _gain(run: RunResult) -> float:
    assert run.control is not None
    metric = run.converted.metrics[0]
    gain = metric.mean - run.control.metrics[0].mean
    return gain if metric.higher_is_better else -gain


def _figure(metric: Metric, unit: int, digits: int) -> str:
    spread = "" if metric.spread is None else f" ± {unit * metric.spread:.{digits}f}"
    return f"{unit * metric.mean:.{digits}f}{spread}"
