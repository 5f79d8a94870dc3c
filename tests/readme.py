"""README's tables, made from what they are about: `python -m tests.readme` prints them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hf_attn_swap import list_variants
from hf_attn_swap.registry import get_variant
from hf_attn_swap.results import RESULTS_FILE, RunResult

CARDS = Path(__file__).parents[1] / "model_cards"
STEPS = (
    ("Calibrated: gain", "gain"),
    ("Calibrated: map", "map"),
    ("Attention transfer", "transfer"),
    ("Strength", "schedule"),
)


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


def conversion_table() -> str:
    """One Markdown row per published run with a paired interval, the best difference first within a data set."""
    lines = [
        "| model, data | attention | conversion | metric | converted | control | difference [95 %] | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    paths = (path for path in CARDS.glob(f"*/{RESULTS_FILE}"))
    runs = [(path, run) for path in paths if (run := RunResult.load(path)).difference is not None]
    for path, run in sorted(runs, key=lambda each: (_where(each[1]), -_gain(each[1]))):
        assert run.control is not None
        assert run.difference is not None
        metric, other, interval = run.converted.metrics[0], run.control.metrics[0], run.difference
        unit = 1 if metric.name == "perplexity" else 100
        steps = " + ".join(word for start, word in STEPS if any(each.startswith(start) for each in run.conversion))
        cells = (
            _where(run),
            f"[`{run.variant}`](model_cards/{path.parent.name}/README.md)",
            steps or "none",
            metric.name,
            _figure(metric, unit),
            _figure(other, unit),
            f"{unit * interval.mean:+.2f} [{unit * interval.low:+.2f}, {unit * interval.high:+.2f}]",
            str(len(run.converted.seeds)),
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _where(run: RunResult) -> str:
    data = " ".join(filter(None, (run.data.name.split("/")[-1], run.data.config)))
    return f"{run.base.name.split('/')[-1]}, {data}"


def _gain(run: RunResult) -> float:
    assert run.difference is not None
    return run.difference.mean if run.converted.metrics[0].higher_is_better else -run.difference.mean


def _figure(metric: object, unit: int) -> str:
    mean, spread = metric.mean, metric.spread  # type: ignore[attr-defined]  # a Metric
    return f"{unit * mean:.2f}" + ("" if spread is None else f" ± {unit * spread:.2f}")


if __name__ == "__main__":
    print(variants_table(), conversion_table(), sep="\n\n")
