"""Time and memory of every variant against the stock SDPA model, in one interleaved run: `python recipes/bench.py`.

Whole layers of the real width of BERT-base, GPT-2, a Llama and ViT-S (`bench_models.py`). Kinds of pass: "forward",
"train" (forward and backward) and, for causal models, "prefill" (forward, filling a cache) and "decode" (one token onto
a cache of that length). Models take turns in random order; a figure is the median over rounds of the ratio to stock in
the same round, with its bootstrap 95 % interval. "stock again" is a second copy: the noise floor. Three or more lengths
of one batch size give the slope of log time in log length: 1 is linear, 2 quadratic. Memory is measured in a process
per model (on Linux, or with CUDA), never compiled: the peak of a training step above the model at rest.
"""

from __future__ import annotations

import json
import math
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import bench_models
import torch
import transformers
from bench_models import KINDS, MODELS
from tqdm import tqdm

from hf_attn_swap import list_variants, patch_model

STOCK, AGAIN = "stock", "stock again"


@dataclass
class Options:
    """What to measure; `child` is for this script's own use."""

    variants: str = ",".join((*list_variants(), "outeffhop+gated", "mha+belief"))
    models: str = "bert"
    kinds: str = "forward,train"
    shapes: str = "8x128,2x512,1x2048"
    layers: int = 2
    width: int = 768
    rounds: int = 30
    threads: int = 2
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "float32"
    compile: bool = False
    memory: bool = True
    out: str = "bench.json"
    child: str = ""


def interval(ratios: list[float]) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[974]


def slope(lengths: Sequence[float], times: Sequence[float]) -> float:
    """Least-squares slope of log time in log length."""
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(t) for t in times]).slope


def build(model: str, length: int, name: str, options: Options) -> Any:
    """The model, stock or with a variant in it."""
    made = bench_models.build(model, length, options.layers, options.width)
    made = made.to(options.device, getattr(torch, options.dtype))
    return made if name in (STOCK, AGAIN) else patch_model(made, name)


def measure(model: str, shape: str, names: list[str], options: Options, bar: Any) -> list[dict[str, Any]]:
    """One row per model in `names`, with ratios to the first."""
    batch, length = map(int, shape.split("x"))
    given = bench_models.inputs(model, batch, length, options.device, getattr(torch, options.dtype))
    models = {name: build(model, length, name, options) for name in names}
    if options.compile:
        models = {name: torch.compile(each) for name, each in models.items()}
    size = {"batch": batch, "tokens": bench_models.tokens(model, length)}
    rows: list[dict[str, Any]] = [{"model": model, "shape": shape, "variant": name, **size} for name in names]
    for kind in bench_models.kinds_of(model, options.kinds):
        caches = {name: bench_models.filled(models[name], given) if kind == "decode" else None for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(-warm_ups(options), options.rounds):
            for name in random.sample(names, len(names)):
                taken = bench_models.seconds(models[name], given, kind, caches[name])
                times[name] += [taken] if turn >= 0 else []
                bar.update()
        for row in rows:
            own = times[row["variant"]]
            ratios = [a / b for a, b in zip(own, times[names[0]], strict=True)]
            row |= {kind: statistics.median(ratios), f"{kind}_95": interval(ratios)}
            row[f"{kind}_ms"] = 1e3 * statistics.median(own)
    return rows


def warm_ups(options: Options) -> int:
    """Rounds that do not count: a compiler may look at the second pass again."""
    return 3 if options.compile else 1


def slopes(rows: list[dict[str, Any]], kinds: list[str]) -> list[dict[str, Any]]:
    """Per model, batch size and variant measured at three lengths or more: the slope of each kind."""
    groups: dict[tuple[str, int, str], dict[int, dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["model"], row["batch"], row["variant"]), {})[row["tokens"]] = row
    found = []
    for (model, batch, variant), group in groups.items():
        if len(group) >= 3:
            present = [kind for kind in kinds if all(kind in row for row in group.values())]
            fits = {kind: slope(list(group), [row[f"{kind}_ms"] for row in group.values()]) for kind in present}
            found.append({"model": model, "batch": batch, "variant": variant, "tokens": list(group), **fits})
    return found


def in_child(script: str, options: Any, what: str) -> float:
    """The number that this script prints last in a process of its own, given `what` as `child`."""
    flags = [f"--{key}={value}" for key, value in asdict(options).items() if key != "child"]
    done = subprocess.run([sys.executable, script, *flags, f"--child={what}"], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr}")
    return float(done.stdout.split()[-1])


def print_peak(options: Options) -> None:
    """In a process of its own: MB of one model's training step above the model at rest."""
    model, shape, name = options.child.split(",")
    batch, length = map(int, shape.split("x"))
    swapped, dtype = build(model, length, name, options), getattr(torch, options.dtype)
    bench_models.seconds(swapped, bench_models.inputs(model, 1, 5, options.device, dtype), "train")
    before = peak(options.device)
    bench_models.seconds(swapped, bench_models.inputs(model, batch, length, options.device, dtype), "train")
    print((peak(options.device) - before) / 2**20)


def peak(device: str) -> int:
    """The most memory this process has held so far, in bytes."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()  # getrusage would count the process that started this one
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def table(rows: list[dict[str, Any]], kinds: list[str]) -> str:
    """The rows as Markdown: ratios to stock, and the figures of stock itself."""
    heads = ["model, batch x length", "attention", *(KINDS[kind] for kind in kinds), "peak memory"]
    lines, stock = [heads, ["---"] * len(heads)], rows[0]
    for row in rows:
        stock = row if row["variant"] == STOCK else stock
        cells = [f"{row['model']} {row['shape']}", row["variant"]]
        for kind in kinds:
            if kind not in row:
                cells.append("")
            elif row is stock:
                cells.append(f"{row[f'{kind}_ms']:.3g} ms")
            else:
                cells.append("{:.2f} [{:.2f}, {:.2f}]".format(row[kind], *row[f"{kind}_95"]))
        if "peak_mb" in row:
            share = row["peak_mb"] / max(stock["peak_mb"], 1e-9)
            cells.append(f"{row['peak_mb']:.0f} MB" if row is stock else f"{share:.2f}")
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
