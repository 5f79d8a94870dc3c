"""Measures attention operators alone, on plain tensors: `python benchmarks/bench_operator.py --out operator.json`.

The script times a forward pass, and a forward with a backward pass, at several lengths. In each round the operators run
in random order; short lengths run several times per round. A ratio is the median over rounds of the ratio to SDPA, with
a bootstrap 95 % interval. A slope is the slope of log time in log length. Memory is the peak of a forward and backward
pass, measured in a new process.

"eager" and "softmax_1 published" hold the whole matrix of scores. "softmax_1" and "simple" are this package's
operators. `flash-attention-softmax-n` and `hf-attention-normalizers` are measured if they can be imported; the second
one needs triton, on the CPU too. Before anything is timed, output and gradients of every operator are compared with a
float64 reference at length 64 (`bench_attentions.py`). The script writes a picture beside the JSON.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_attentions import OWN, Operator, check, peers, quadratic, seconds, tensors
from bench_figures import cell, in_child, megabytes, peak_above, slopes, summary, write
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import HfArgumentParser

from hf_attn_swap.text.table import markdown

KINDS = {"forward": "forward", "train": "forward and backward"}
REFUSALS = (AssertionError, RuntimeError, TypeError, ValueError)
CHECKED, SHORT = 64, 2048  # tokens of the check; below SHORT tokens a round repeats the call


@dataclass
class Options:
    """What to measure. Only this script itself sets `child`."""

    lengths: str = "128,512,2048,8192"
    batch: int = 1
    heads: int = 12
    width: int = 64
    causal: bool = False
    rounds: int = 9
    eager_up_to: int = 4096
    threads: int = 2
    device: str = "cpu"
    dtype: str = "float32"
    memory: bool = True
    out: str = "bench_operator.json"
    child: str = ""


def shape(length: int, options: Options) -> tuple[int, ...]:
    return options.batch, options.heads, length, options.width


def usable(length: int, options: Options, left_out: list[dict[str, Any]]) -> dict[str, Operator]:
    """The operators that run at this length and are correct. Peers that are not are added to `left_out`."""
    where, result = (options.device, getattr(torch, options.dtype)), {}
    given = tensors(shape(length, options), *where)
    for name, operator in {**OWN, **peers()}.items():
        if length > options.eager_up_to and quadratic(name, options.causal):
            continue
        try:
            check(name, operator, shape(CHECKED, options), options.causal, *where)
            for kind in KINDS:
                seconds(operator, given, options.causal, kind)
        except REFUSALS as why:
            if name in OWN:
                raise
            left_out.append({"operator": name, "length": length, "why": str(why)})
            continue
        result[name] = operator
    return result


def measure(length: int, operators: dict[str, Operator], options: Options, bar: Any) -> list[dict[str, Any]]:
    """One row per operator, with ratios to the first operator."""
    given = tensors(shape(length, options), options.device, getattr(torch, options.dtype))
    names = list(operators)
    rows: list[dict[str, Any]] = [{"operator": name, "length": length} for name in names]
    for kind in KINDS:
        times: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(options.rounds):
            for name in random.sample(names, len(names)):
                calls = max(1, SHORT // length)
                times[name].append(seconds(operators[name], given, options.causal, kind, calls))
            bar.update()
        for row in rows:
            row |= summary(kind, times[row["operator"]], times[names[0]])
    return rows


def print_peak(options: Options) -> None:
    """Print the peak memory of one operator's forward and backward pass in MB. Runs in a new process."""
    length, _, name = options.child.partition(",")
    operator, where = {**OWN, **peers()}[name], (options.device, getattr(torch, options.dtype))
    given = tensors(shape(int(length), options), *where)
    seconds(operator, tensors(shape(8, options), *where), options.causal, "train")
    print(peak_above(options.device, lambda: seconds(operator, given, options.causal, "train")))


def tables(rows: list[dict[str, Any]], fits: list[dict[str, Any]]) -> str:
    """Markdown tables: ratios to SDPA, with SDPA's own time and memory; then the slopes, if there are any."""
    lines, first = [], rows[0]
    for row in rows:
        first = row if row["operator"] == "sdpa" else first
        figures = [cell(row, kind, first=row is first) for kind in KINDS]
        lines.append([str(row["length"]), row["operator"], *figures, megabytes(row, first)])
    text = markdown(["length", "attention", *KINDS.values(), "peak memory"], lines)
    lines = [[fit["operator"], *(f"{fit[kind]:.2f}" for kind in KINDS)] for fit in fits]
    return f"{text}\n\n{markdown(['slope', *KINDS.values()], lines)}" if fits else text


def picture(rows: list[dict[str, Any]], fits: list[dict[str, Any]]) -> Figure:
    """Time and peak memory against length on logarithmic axes, with the slopes in the legend."""
    titles = {f"{kind}_ms": f"{title}, ms" for kind, title in KINDS.items()}
    titles |= {"peak_mb": "peak memory of both, MB"} if "peak_mb" in rows[0] else {}
    figure = Figure(figsize=(5 * len(titles), 5), layout="constrained")
    for axes, (column, title) in zip(figure.subplots(1, len(titles)), titles.items(), strict=True):
        kind = column.removesuffix("_ms")
        for number, name in enumerate(dict.fromkeys(row["operator"] for row in rows)):
            own = [row for row in rows if row["operator"] == name]
            label = name + "".join(f" ({fit[kind]:.2f})" for fit in fits if fit["operator"] == name and kind in fit)
            values = [row[column] for row in own]
            axes.plot([row["length"] for row in own], values, f"C{number}o-", markersize=4, label=label)
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="tokens", title=title)
        axes.legend(fontsize="x-small")
    return figure


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    torch.set_num_threads(options.threads)
    if options.child:
        print_peak(options)
        return
    lengths = sorted(map(int, options.lengths.split(",")))
    rows: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    with tqdm(total=len(lengths) * len(KINDS) * options.rounds, unit="round") as bar:
        for length in lengths:
            rows += measure(length, usable(length, options, left_out), options, bar)
    for row in tqdm(rows, desc="memory") if options.memory else ():
        row["peak_mb"] = in_child(__file__, options, f"{row['length']},{row['operator']}")
    fits = slopes(rows, ("operator",), "length", KINDS)
    write(options.out, options, rows=rows, slopes=fits, left_out=left_out)
    picture(rows, fits).savefig(Path(options.out).with_suffix(".png"), dpi=90)
    print(tables(rows, fits))


if __name__ == "__main__":
    main()
