"""Functions that the benchmarks share: intervals, slopes, memory in a new process, tables and files."""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The bootstrap 95 % interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[974]


def slope(lengths: Iterable[float], times: Iterable[float]) -> float:
    """The least-squares slope of log time in log length."""
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(t) for t in times]).slope


def slopes(
    rows: Iterable[Mapping[str, Any]], same: Sequence[str], length: str, kinds: Iterable[str]
) -> list[dict[str, Any]]:
    """The slope of every kind of pass, for each group of rows with equal columns `same` and at least three lengths."""
    groups: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in same), {})[row[length]] = row
    results = []
    for values, group in groups.items():
        if len(group) < 3:
            continue
        fits = {}
        for kind in kinds:
            if all(kind in row for row in group.values()):
                fits[kind] = slope(group, [row[f"{kind}_ms"] for row in group.values()])
        results.append({**dict(zip(same, values, strict=True)), "lengths": list(group), **fits})
    return results


def summary(kind: str, own: Sequence[float], first: Sequence[float]) -> dict[str, Any]:
    """The results of one kind of pass: the median ratio of the rounds, its interval, and the median time."""
    ratios = [a / b for a, b in zip(own, first, strict=True)]
    milliseconds = 1e3 * statistics.median(own)
    return {kind: statistics.median(ratios), f"{kind}_95": interval(ratios), f"{kind}_ms": milliseconds}


def cell(row: Mapping[str, Any], kind: str, *, first: bool) -> str:
    """The result of one kind of pass as text: the ratio with its interval, or for `first` the time itself."""
    if kind not in row:
        return ""
    low, high = row[f"{kind}_95"]
    return f"{row[f'{kind}_ms']:.3g} ms" if first else f"{row[kind]:.2f} [{low:.2f}, {high:.2f}]"


def megabytes(row: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Peak memory as text: MB for the row `first`, and the ratio to `first` for every other row."""
    if "peak_mb" not in row or "peak_mb" not in first:
        return ""
    return f"{row['peak_mb']:.0f} MB" if row is first else f"{row['peak_mb'] / max(first['peak_mb'], 1e-9):.2f}"


def in_child(script: str, options: Any, what: str) -> float:
    """Run a script in a new process with `what` as the option `child`, and return the last number that it prints.

    In that process every tensor above 64 KB has memory of its own, which goes back when the tensor is freed. Otherwise
    the holes in the heap would count as memory, and they differ from run to run by more than the attentions do.
    """
    flags = [f"--{name}={value}" for name, value in asdict(options).items() if name != "child"]
    command = [sys.executable, script, *flags, f"--child={what}"]
    exact = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | exact)
    if done.returncode:
        raise RuntimeError(f"{what}: {done.stderr}")
    return float(done.stdout.split()[-1])


def peak_above(device: str, run: Callable[[], Any]) -> float:
    """The most memory that this process holds during `run`, above what it holds before, in MB."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return (torch.cuda.max_memory_allocated() - before) / 2**20
    Path("/proc/self/clear_refs").write_text("5")  # the highest mark becomes what the process holds now
    before = _held("VmRSS")
    run()
    return (_held("VmHWM") - before) / 2**20


def _held(name: str) -> int:
    """A memory figure of this process, in bytes. `getrusage` would count the parent process too."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{name}:")[2].split()[0])


def write(out: str, options: Any, **found: Any) -> None:
    """Write the results of a run as JSON, with the options and the machine."""
    machine = {"machine": platform.platform(), "torch": torch.__version__, "transformers": transformers.__version__}
    record = json.dumps({"options": asdict(options), "machine": machine, **found}, indent=2)
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    Path(out).write_text(f"{record}\n", encoding="utf-8")
