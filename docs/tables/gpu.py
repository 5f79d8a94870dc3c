"""The figures of GPUs, made from the folders under `benchmarks/figures/gpu` that `python -m benchmarks.gpu` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from hf_attn_swap.text.table import markdown

FIGURES = Path(__file__).parents[2] / "benchmarks" / "figures" / "gpu"
STAGES = {
    "right": "every variant on six families, forward, gradients and decoding, against its readable form in fp64",
    "layers": "attention layers with the sizes of LLaMA-8B, and operators alone, beside stock",
    "models": "a whole model: prefill, decoding, a training step with LoRA, and some steps of `convert`",
    "integers": "8-bit integers beside bf16",
}
NONE = "**No figure from a GPU yet.** These are the stages that one command measures:"


def gpu_tables(figures: Path = FIGURES) -> str:
    """A section for each folder; without one, what would be measured."""
    folders = sorted(path.parent for path in figures.glob("*/machine.json"))
    if not folders:
        return f"{NONE}\n\n{markdown(('stage', 'what'), STAGES.items())}"
    return "\n\n".join(map(_section, folders))


def _section(folder: Path) -> str:
    """The tables of one card."""
    machine = json.loads((folder / "machine.json").read_text("utf-8"))
    rows = [json.loads(line) for line in (folder / "figures.jsonl").read_text("utf-8").splitlines()]
    names = ("driver", "cuda", "cudnn", "torch", "transformers", "commit")
    parts = [f"### {machine['card']}", ", ".join(f"{name} {machine[name]}" for name in names) + "."]
    right = [row for row in rows if "right" in row]
    if right:
        parts.append(f"Right: {sum(row['right'] for row in right)} of {len(right)} cells.")
    bad = [(row["stage"], row["cell"], row.get("error", "not right")) for row in rows if _is_bad(row)]
    if bad:
        parts.append(markdown(("stage", "cell", "what is wrong"), bad))
    for stage in ("layers", "models", "integers"):
        timed = [row for row in rows if row["stage"] == stage and ", " in row["cell"]]
        if timed:
            parts += [f"{STAGES[stage].capitalize()}:", _ratios(timed)]
    converted = [row for row in rows if "peak_gb" in row]
    if converted:
        header = ("conversion", "weights, GB", "counted before, GB", "peak, GB")
        cells = [[f"{row[name]:.1f}" for name in ("weights_gb", "counted_gb", "peak_gb")] for row in converted]
        parts.append(markdown(header, [(row["cell"], *more) for row, more in zip(converted, cells, strict=True)]))
    return "\n\n".join(parts)


def _is_bad(row: dict[str, Any]) -> bool:
    return "error" in row or row.get("right") is False


def _ratios(rows: list[dict[str, Any]]) -> str:
    """Times as ratios to stock, one line per attention, and one column for the rest of a cell's name."""
    by_place: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        name, _, column = row["cell"].partition(", ")
        if "peak_gb" not in row:
            by_place.setdefault(name, {})[column] = row
    columns = list(dict.fromkeys(column for cells in by_place.values() for column in cells))
    stock = {
        column: [cells[column]["stock_ms"] for cells in by_place.values() if "stock_ms" in cells.get(column, {})]
        for column in columns
    }
    titles = [f"{column} (stock {median(stock[column]):.3g} ms)" if stock[column] else column for column in columns]
    lines = [(name, *(_cell(cells.get(column, {})) for column in columns)) for name, cells in by_place.items()]
    return markdown(("attention", *titles), lines)


def _cell(row: dict[str, Any]) -> str:
    """The ratio with its interval, or why there is none."""
    ratios = [name for name in row if f"{name}_95" in row]
    if ratios:
        low, high = row[f"{ratios[0]}_95"]
        return f"{row[ratios[0]]:.2f} [{low:.2f}, {high:.2f}]"
    return "out of memory" if "out_of_memory" in row else "failed" if "error" in row else row.get("left_out", "")
