"""The tables of speed and memory, made from what the benchmarks wrote under `benchmarks/figures`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_attn_swap import list_variants
from hf_attn_swap.text.table import markdown

from .names import canonical_label

FIGURES = Path(__file__).parents[2] / "benchmarks" / "figures"
COMPILED = ", compiled"
TITLES = {"forward": "forward", "train": "training step", "decode": "decoding after"}


def speed_table() -> str:
    """Ratios of whole models to stock, one column per shape and kind, from `benchmarks/bench.py`."""
    return _whole_models("bench-bert.json")


def weighted_table() -> str:
    """As `speed_table`, for the variants that need the weights, and for their readable formula if it was measured."""
    return _whole_models("bench-weighted.json")


def _whole_models(record: str) -> str:
    rows = json.loads((FIGURES / record).read_text("utf-8"))["rows"]
    kinds = {"forward": "forward", "train": "training step", "peak_mb": "peak memory"}
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    titles = [f"{shape.replace('x', ' × ')}, {title}" for shape in shapes for title in kinds.values()]
    lines = []
    for name in dict.fromkeys(row["variant"] for row in rows):
        by_name = {row["shape"]: row for row in rows if row["variant"] == name}
        first = {row["shape"]: row for row in rows if row["variant"] == "stock"}
        cells = [
            _ratio(by_name[shape], first[shape], kind) if shape in by_name else "" for shape in shapes for kind in kinds
        ]
        label = canonical_label(name)
        shown = f"`{label}`" if label in list_variants() else label
        lines.append((shown, *cells))
    return markdown(("attention", *titles), lines)


def speed_of(variant: str) -> str | None:
    """One variant's ratios to stock, one row per shape; None if the variant was not measured."""
    rows = json.loads((FIGURES / "bench-bert.json").read_text("utf-8"))["rows"]
    first = {row["shape"]: row for row in rows if row["variant"] == "stock"}
    lines = []
    for row in (row for row in rows if canonical_label(row["variant"]) == variant):
        cells = [_ratio(row, first[row["shape"]], kind) for kind in ("forward", "train", "peak_mb")]
        lines.append((row["shape"].replace("x", " × "), *cells))
    return markdown(("batch × tokens", "forward", "training step", "peak memory"), lines) if lines else None


def operator_table() -> str:
    """The attention operator alone against SDPA, from `benchmarks/bench_operator.py`; slopes where they were fitted."""
    lines: list[tuple[str, ...]] = []
    for path in sorted(FIGURES.glob("bench-operator*.json")):
        study = json.loads(path.read_text("utf-8"))
        order = ", causal" if study["options"]["causal"] else ""
        first: dict[str, Any] = {}
        for row in study["rows"]:
            first = row if row["operator"] == "sdpa" else first
            cells = [_ratio(row, first, kind) for kind in ("forward", "train", "peak_mb")]
            lines.append((f"{row['length']:,}{order}", row["operator"], *cells))
        for fit in study["slopes"]:
            span = f"slope, {min(fit['lengths']):,} to {max(fit['lengths']):,}{order}"
            lines.append((span, fit["operator"], f"{fit['forward']:.2f}", f"{fit['train']:.2f}", ""))
    return markdown(("length", "attention", "forward", "forward and backward", "peak memory"), lines)


def lra_table() -> str:
    """Time and memory of a training step against the length of a text, as ratios to stock: `benchmarks/bench.py`."""
    rows = json.loads((FIGURES / "bench-lra.json").read_text("utf-8"))["rows"]
    lengths = sorted({row["tokens"] for row in rows})
    titles = [f"{length:,} tokens, {title}" for length in lengths for title in ("training step", "peak memory")]
    lines = []
    by_name = {(row["variant"], row["tokens"]): row for row in rows}
    for name in dict.fromkeys(row["variant"] for row in rows):
        pairs = [(by_name[name, length], by_name["stock", length]) for length in lengths]
        cells = [_ratio(row, first, kind) for row, first in pairs for kind in ("train", "peak_mb")]
        lines.append((canonical_label(name), *cells))
    return markdown(("attention", *titles), lines)


def long_texts_of(variant: str) -> str | None:
    """One variant's ratios to stock on long texts, one row per length; None if the variant was not measured there."""
    rows = json.loads((FIGURES / "bench-lra.json").read_text("utf-8"))["rows"]
    first = {row["tokens"]: row for row in rows if row["variant"] == "stock"}
    lines = [
        (f"{row['tokens']:,}", *(_ratio(row, first[row["tokens"]], kind) for kind in ("train", "peak_mb")))
        for row in rows
        if canonical_label(row["variant"]) == variant
    ]
    return markdown(("tokens", "training step", "peak memory"), lines) if lines else None


def small_llama_table() -> str:
    """A LLaMA with the shape of SmolLM2-135M: stock's times, and ratios to stock, from `benchmarks/bench.py`."""
    columns: dict[str, dict[str, str]] = {}
    for part in ("forward", "train", "decode", "decode-16k"):
        rows = json.loads((FIGURES / f"bench-smollm2-{part}.json").read_text("utf-8"))["rows"]
        kind = part.partition("-")[0]
        first = {row["tokens"]: row for row in rows if row["variant"] == "stock"}
        for row in rows:
            column = columns.setdefault(f"{TITLES[kind]}, {row['tokens']:,}", {})
            column[canonical_label(row["variant"])] = _ratio(row, first[row["tokens"]], kind)
    compiled = json.loads((FIGURES / "bench-smollm2-compile.json").read_text("utf-8"))["rows"]
    forward = {row["variant"].removesuffix(COMPILED): row for row in compiled if row["variant"].endswith(COMPILED)}
    columns["forward, 512, both compiled"] = {
        canonical_label(name): f"{row['forward'] / forward['stock']['forward']:.2f}" for name, row in forward.items()
    }
    names = next(iter(columns.values()))
    return markdown(
        ("attention", *columns), [(name, *(cells.get(name, "") for cells in columns.values())) for name in names]
    )


def window_table() -> str:
    """Prefill, a training step and its memory with attention in a window, as ratios to stock: `benchmarks/bench.py`."""
    study = json.loads((FIGURES / "bench-window.json").read_text("utf-8"))
    kinds = {"prefill": "prefill", "train": "training step", "peak_mb": "peak memory of a training step"}
    by_name = {(row["variant"], row["tokens"]): row for row in study["rows"]}
    lines = []
    for (name, tokens), row in by_name.items():
        cells = (_ratio(row, by_name["stock", tokens], kind) for kind in kinds)
        lines.append((f"{tokens:,}", canonical_label(name), *cells))
    for fit in study["slopes"]:
        span = f"slope, {min(fit['lengths']):,} to {max(fit['lengths']):,}"
        lines.append((span, canonical_label(fit["variant"]), f"{fit['prefill']:.2f}", f"{fit['train']:.2f}", ""))
    return markdown(("tokens", "attention", *kinds.values()), lines)


def serving_table() -> str:
    """Tokens per second and memory of a hybrid beside stock: `benchmarks/bench_serving.py`."""
    study = json.loads((FIGURES / "bench-serving.json").read_text("utf-8"))
    lines = []
    for row in study["rows"]:
        low, high = row["generate_95"]
        ratio = "1" if row["model"] == "stock" else f"{row['generate']:.2f} [{low:.2f}, {high:.2f}]"
        memory = (f"{row[key]:,.0f} MB" for key in ("cache_mb", "weights_mb"))
        lines.append((row["model"], f"{row['tokens_per_second']:.2f}", ratio, *memory))
    return markdown(("model", "tokens per second", "time, stock = 1", "cache", "weights"), lines)


def compile_table() -> str:
    """What `torch.compile` brings each attention: the compiled twin over its own, as ratios to stock."""
    rows = json.loads((FIGURES / "bench-compile.json").read_text("utf-8"))["rows"]
    by_name = {row["variant"]: row for row in rows}
    lines = []
    for name in (name for name in by_name if f"{name}, compiled" in by_name):
        ratios = [by_name[f"{name}, compiled"][kind] / by_name[name][kind] for kind in ("forward", "train")]
        lines.append((canonical_label(name), f"{ratios[0]:.2f}", f"{ratios[1]:.2f}"))
    return markdown(("attention", "forward, compiled / eager", "training step, compiled / eager"), lines)


def _ratio(row: dict[str, Any], first: dict[str, Any], kind: str) -> str:
    """The ratio to the first row with its interval, or the first row's own figure."""
    if kind == "peak_mb":
        return f"{row[kind]:.0f} MB" if row is first else f"{row[kind] / first[kind]:.2f}"
    low, high = row[f"{kind}_95"]
    took = row[f"{kind}_ms"]
    own = f"{took:,.0f} ms" if took >= 1000 else f"{took:.3g} ms"
    return own if row is first else f"{row[kind]:.2f} [{low:.2f}, {high:.2f}]"
