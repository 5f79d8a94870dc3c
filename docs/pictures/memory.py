"""Draws the peak memory of attention against the length, from what `benchmarks/bench_operator.py` measured."""

from __future__ import annotations

import json

from matplotlib.figure import Figure

from docs.tables.speed import FIGURES

FILE = "attention-memory.png"
RECORDS = ("bench-operator.json", "bench-operator-long.json")  # of the same sizes; the later one is of longer rows
SHOWN = {"eager": "softmax, all weights held", "sdpa": "softmax, fused (SDPA)", "simple": "linear (SimpleTRON)"}


def draw() -> Figure:
    """One line per attention, on logarithmic axes."""
    found: dict[str, dict[int, float]] = {name: {} for name in SHOWN}
    for record in RECORDS:
        for row in json.loads((FIGURES / record).read_text("utf-8"))["rows"]:
            if row["operator"] in SHOWN:
                found[row["operator"]][row["length"]] = row["peak_mb"]
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    for name, points in found.items():
        axes.plot(*zip(*sorted(points.items()), strict=True), "o-", markersize=4, label=SHOWN[name])
    axes.set_xscale("log", base=2)
    axes.set(yscale="log", xlabel="tokens", ylabel="peak of a forward and backward pass, MB")
    axes.legend(fontsize="small")
    return figure
