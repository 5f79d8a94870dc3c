"""The tables of runs, made from their records: the published models, conversions, and models from random weights."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from statistics import fmean
from typing import Any

from hf_attn_swap.layer.registry import get_variant
from hf_attn_swap.publish.results import RESULTS_FILE, SCRATCH, Metric, RunResult
from hf_attn_swap.text.table import markdown

CARDS = Path(__file__).parents[2] / "model_cards"
RECORDS = CARDS / "runs"
HUB = "https://huggingface.co"
SHOWN = ("difference [95 %]", "converted", "control", "metric")
SEEDS = "seeds"  # the last column: `docs/tables/seeds.py` marks a 1


def published_table() -> str:
    """One Markdown row per model that has a card: what it is, what it lost, and the way to its card."""
    header = ("card", *SHOWN, "attention", "data", "base model", SEEDS)
    return markdown(header, [[_link(run), *_figures(run), *_what(run), _seeds(run)] for run in cards()])


def minutes_table() -> str:
    """One Markdown row per distilled model that has a card: what it read, and how long it took by the clock."""
    header = ("card", "attention", "training rows", "tokens of a row", "on", "minutes")
    rows = []
    for run in cards():
        if "distil" in (run.steps or ()):
            read = (f"{run.data.rows['train']:,}", str(run.budget.sequence_length))
            minutes = f"{run.converted.wall_seconds / 60:.0f}"
            rows.append([_link(run), _attention(run), *read, run.hardware, minutes])
    return markdown(header, rows)


def conversion_table(variant: str | None = None) -> str:
    """One Markdown row per conversion with a control, the best difference first within a study.

    Args:
        variant: only runs of this variant, alone or in a composition; None means all runs.
    """
    results = [run for run in recorded(variant) if run.base.relation != SCRATCH]
    header = ("run", *SHOWN, "attention", "conversion", SEEDS)
    rows = [[_link(run), *_figures(run), _attention(run), _steps(run), _seeds(run)] for run in results]
    return markdown(header, rows)


def scratch_table(variant: str | None = None) -> str:
    """The same for models from random weights."""
    results = [run for run in recorded(variant) if run.base.relation == SCRATCH]
    header = ("run", SHOWN[0], "swapped", *SHOWN[2:], "attention", SEEDS)
    return markdown(header, [[_link(run), *_figures(run), _attention(run), _seeds(run)] for run in results])


def tasks_table(model: str) -> str:
    """One Markdown row per task and attention of the studies MODEL-TASK, then the means over several tasks.

    A task has no hyphen in its name, as those of GLUE.
    """
    rows = []
    gains: dict[str, list[float]] = {}
    for run in recorded():
        kind, _, task = (run.study or "").rpartition("-")
        if kind == model:
            rows.append([task, _attention(run), *_figures(run), _seeds(run)])
            gains.setdefault(_attention(run), []).append(_gain(run))
    for attention, result in sorted(gains.items(), key=lambda pair: -fmean(pair[1])):
        if len(result) > 1:
            rows.append([f"mean of {len(result)}", attention, f"{100 * fmean(result):+.2f}", "", "", "", ""])
    return markdown(("task", "attention", *SHOWN, SEEDS), rows)


def perplexities_table(*studies: str) -> str:
    """One Markdown row per run of these studies: the perplexity before and after the conversion, and the control's."""
    rows = []
    for run in recorded():
        if run.study in studies:
            assert run.control is not None
            by_name = {metric.name: metric.mean for metric in run.converted.metrics}
            before, ours, control = by_name["perplexity_before"], by_name["perplexity"], run.control.metrics[0].mean
            model = run.study.partition("-")[0]
            ratio = f"{ours / control:.3f}"
            rows.append([model, _attention(run), ratio, f"{ours:.3f}", f"{control:.3f}", f"{before:,.2f}"])
    return markdown(("model", "attention", "converted / control", "converted", "control", "as patched"), rows)


def recorded(variant: str | None = None) -> list[RunResult]:
    """All runs with a control, or those of one variant, by study (one model on one data set), the best first."""
    return [run for run in _controlled() if variant is None or variant in _components(run)]


def cards() -> list[RunResult]:
    """The runs whose models have a card, in the order of `recorded`."""
    return [run for run in _controlled() if has_card(run)]


def has_card(run: RunResult) -> bool:
    """True for a model with a card, False for the record of a run."""
    return (CARDS / run.name / RESULTS_FILE).is_file()


@functools.cache
def _controlled() -> tuple[RunResult, ...]:
    """All runs with a control, in the order of `recorded`. The records are read once: reading them takes seconds."""
    runs = []
    for path in (*CARDS.glob(f"*/{RESULTS_FILE}"), *RECORDS.glob(f"*/{RESULTS_FILE}")):
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
    """The attention, the data, and the base model."""
    data = " ".join(filter(None, (run.data.name, run.data.config)))
    return [_attention(run), data, f"[{run.base.name.split('/')[-1]}]({HUB}/{run.base.name})"]


def link(run: RunResult) -> str:
    """Where the card or the record is. `docs/hooks.py` makes a link to it lead to the page of the site."""
    path = f"{run.name}/README.md" if has_card(run) else f"{RECORDS.name}/{run.name}/{RESULTS_FILE}"
    return f"{CARDS.name}/{path}"


def _link(run: RunResult) -> str:
    return f"[{run.name}]({link(run)})"


def _attention(run: RunResult) -> str:
    return f"`{run.variant}`{_options(run)}"


def _steps(run: RunResult) -> str:
    """The steps of the conversion."""
    return "not recorded" if run.steps is None else " + ".join(run.steps) or "none"


def _figures(run: RunResult) -> list[str]:
    """The difference and its interval, both values, and the metric: what `SHOWN` names."""
    assert run.control is not None
    metric, control, interval = run.converted.metrics[0], run.control.metrics[0], run.difference
    unit, digits = (100, 2) if metric.higher_is_better else (1, 4 if metric.name == "mse" else 2)
    bounds = "" if interval is None else f" [{unit * interval.low:+.{digits}f}, {unit * interval.high:+.{digits}f}]"
    return [
        f"{unit * (metric.mean - control.mean):+.{digits}f}{bounds}",
        _figure(metric, unit, digits),
        _figure(control, unit, digits),
        metric.name,
    ]


def _seeds(run: RunResult) -> str:
    return str(len(run.converted.seeds))


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
