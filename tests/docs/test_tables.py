"""The tables of conversions: every figure is that of its record, and means and differences are right."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from docs.tables.conversions import compared_table
from docs.tables.eight_bits import eight_bits_table, largest_table
from docs.tables.runs import CARDS, RECORDS, tasks_table


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table, without the header."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def records(prefix: str) -> list[dict[str, Any]]:
    """The records of all runs, cards among them, of the studies that begin with `prefix`."""
    paths = [*CARDS.glob("*/results.json"), *RECORDS.glob("*/results.json")]
    loaded = [json.loads(path.read_text("utf-8")) for path in paths]
    return [record for record in loaded if (record["study"] or "").startswith(prefix)]


def mean_of(figures: dict[str, Any], name: str) -> float:
    (metric,) = (metric for metric in figures["metrics"] if metric["name"] == name)
    return fmean(metric["values"])


def attention(record: dict[str, Any]) -> str:
    return f"`{'+'.join(component['name'] for component in record['swaps'][0]['components'])}`"


@pytest.mark.parametrize("model", ["minilm-distilled", "vit-s-distilled"])
def test_tasks_and_their_means(model: str) -> None:
    rows = {(row[0], row[1].split(",")[0]): row for row in cells(tasks_table(model))}
    gains: dict[str, list[float]] = {}
    runs = [run for run in records(f"{model}-") if "-" not in run["study"].removeprefix(f"{model}-")]  # not AG News
    assert runs
    for record in runs:
        task = record["study"].removeprefix(f"{model}-")
        name = record["converted"]["metrics"][0]["name"]
        converted, control = (100 * mean_of(record[which], name) for which in ("converted", "control"))
        _, _, difference, ours, theirs, metric, seeds = rows.pop((task, attention(record)))
        assert (metric, seeds) == (name, str(len(record["converted"]["seeds"])))
        assert float(ours.split()[0]) == pytest.approx(converted, abs=0.005)
        assert float(theirs.split()[0]) == pytest.approx(control, abs=0.005)
        assert float(difference.split()[0]) == pytest.approx(converted - control, abs=0.005)
        gains.setdefault(attention(record), []).append(converted - control)
    for name, values in gains.items():
        if len(values) == 1:
            continue
        row = rows.pop((f"mean of {len(values)}", name))
        assert float(row[2]) == pytest.approx(fmean(values), abs=0.005)
    assert not rows


def test_a_control_beside_what_it_became(tmp_path: Path) -> None:
    """One row per seed, then their mean and its spread: 88 - 90, and 91 - 90, are -0.5 on average."""
    compare = {"stock_accuracy": 0.9, "accuracy_margin": 0.01, "divergence": 0.25}
    runs = [
        {"variant": "belief", "seed": 0, "bf16": False, "tokens": 1000, "compare": {"accuracy": 0.88, "loss": 0.02}},
        {"variant": "belief", "seed": 1, "bf16": True, "tokens": 2000, "compare": {"accuracy": 0.91, "loss": -0.01}},
        {"variant": "gated", "seed": 0, "bf16": False, "tokens": 1000, "compare": {"accuracy": 0.9, "loss": 0.0}},
    ]
    for run in runs:
        run["compare"] |= compare
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"runs": runs}))
    assert cells(compared_table(record)) == [
        ["`belief`", "0", "-2.00 ± 1.00", "88.00%", "90.00%", "1,000", "0.250"],
        ["`belief`", "1", "+1.00 ± 1.00", "91.00%", "90.00%", "2,000, --bf16", "0.250"],
        ["`belief`", "mean of 2", "-0.50, standard deviation 2.12", "", "", "", ""],
        ["`gated`", "0", "+0.00 ± 1.00", "90.00%", "90.00%", "1,000", "0.250"],
    ]


def test_what_eight_bits_cost(tmp_path: Path) -> None:
    """Points for accuracies, ratios for perplexities, and a state that a model does not have."""
    top = {"value": 1234.5, "place": 3, "token": 7, "word": "\n", "norm": "model.1.norm"}
    stock = {"figures": {"a/test": [0.9, 0, 0, 0]}, "largest": top}
    rounded = {"figures": {"a/test": [0.88, -0.02, -0.031, 0.001]}, "largest": top}
    runs = {"stock, full precision": stock, "stock, 8 bits": rounded}
    lost = {"figures": {"b/test": [27.5, 281285.2, 1.25, 1.5]}, "largest": top | {"value": 2.5, "word": None}}
    more = {
        "stock, full precision": lost,
        "sink, full precision": lost,
        "sink, 8 bits": lost,
        "sink, trained, 8 bits": lost,
        "rotated, 8 bits": lost,
        "rotated, sink, 8 bits": lost,
    }
    studies = [
        {"name": "one", "metric": "accuracy", "protocol": "machine", "runs": runs},
        {"name": "two", "metric": "perplexity", "protocol": "papers", "runs": more},
    ]
    paths = [tmp_path / f"{study['name']}.json" for study in studies]
    for path, study in zip(paths, studies, strict=True):
        path.write_text(json.dumps(study))
    assert cells(eight_bits_table("accuracy", paths)) == [["one", "a/test", "machines", "90.0", "-2.0 (-3.1 to +0.1)"]]
    table = eight_bits_table("perplexity", paths)
    assert table.startswith("| model | text | as | full precision | sink | rotated | rotated, sink | trained |")
    lost = "281,285 (1.250–1.500)"
    assert cells(table) == [["two", "b/test", "papers", "27.50", lost, lost, lost, lost]]
    assert cells(largest_table(paths)) == [
        ["one", "a/test", "1,234, token 3 `'\\n'`, `1.norm`", "–"],
        ["two", "b/test", "2.5, token 3, `1.norm`", "2.5, token 3, `1.norm`"],
    ]
