"""Measures time and memory of every variant against the stock SDPA model: `python benchmarks/bench.py`.

The models are whole layers of the real width of BERT-base, GPT-2, a Llama and ViT-S (`bench_models.py`). The kinds of
pass are "forward", "train" (forward and backward) and, for causal models, "prefill" (a forward pass that fills a cache)
and "decode" (one token onto a cache of that length).

In each round the models run in random order. A result is the median over rounds of the ratio to the stock model in the
same round, with its bootstrap 95 % interval. "stock again" is a second copy of the stock model, and shows the noise. If
a batch size has three lengths or more, the slope of log time in log length is computed: 1 is linear, 2 is quadratic.

Memory is the peak of a training step above the model at rest, measured in a process per model (on Linux, or with CUDA).
A variant may have one option that takes a name, as in modern_hopfield:memory=low.
With --readable every variant also runs by the readable formula, which makes all weights as one tensor.
With --compile every model also runs compiled in the same rounds, and memory is not measured.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import bench_models
import torch
import transformers
from bench_figures import cell, in_child, megabytes, peak_above, slopes, summary, write
from bench_models import KINDS, MODELS
from tqdm import tqdm

from hf_attn_swap import list_variants, patch_model
from hf_attn_swap.text.table import markdown

STOCK, AGAIN = "stock", "stock again"
READABLE = ", readable"  # what follows the name of a variant that runs by its readable formula
WARM_UPS = 3  # rounds that do not count: a compiler may compile again in the second pass


@dataclass
class Options:
    """What to measure. `compile` needs torch 2.13 or newer, and no fewer `warm_ups`. Only this script sets `child`.

    `clock` is "wall" or "processor": the time of the processor, for one thread on a machine with other work.
    """

    variants: str = ",".join((*list_variants(), "outeffhop+gated", "modern_hopfield+belief"))
    models: str = "bert"
    kinds: str = "forward,train"
    shapes: str = "8x128,2x512,1x2048"
    layers: int = 2
    width: int = 768
    rounds: int = 30
    warm_ups: int = WARM_UPS
    threads: int = 2
    clock: str = "wall"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "float32"
    compile: bool = False
    readable: bool = False
    memory: bool = True
    out: str = "bench.json"
    child: str = ""


def build(model: str, length: int, name: str, options: Options) -> Any:
    """The model, stock or with the named variant."""
    made = bench_models.build(model, length, options.layers, options.width)
    made = made.to(options.device, getattr(torch, options.dtype))
    if name in (STOCK, AGAIN):
        return made
    variant, _, option = name.removesuffix(READABLE).partition(":")
    key, _, value = option.partition("=")
    return patch_model(made, variant, **({key: value} if option else {}))


def words(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments of this model's passes. A model that is asked for its weights computes the readable formula."""
    return {**given, "output_attentions": True} if name.endswith(READABLE) else given


def measure(model: str, shape: str, names: list[str], options: Options, bar: Any) -> list[dict[str, Any]]:
    """One row per model in `names`, with ratios to the first model."""
    batch, length = map(int, shape.split("x"))
    given = bench_models.inputs(model, batch, length, options.device, getattr(torch, options.dtype))
    models = {name: build(model, length, name, options) for name in names}
    if options.compile:
        compiled: Any = torch.compile  # its type annotations lack this option
        torch.compiler.reset()
        models |= {f"{name}, compiled": compiled(models[name], isolate_recompiles=True) for name in names}
        names = list(models)
    size = {"batch": batch, "tokens": bench_models.tokens(model, length)}
    rows: list[dict[str, Any]] = [{"model": model, "shape": shape, "variant": name, **size} for name in names]
    for kind in bench_models.kinds_of(model, options.kinds):
        caches = {name: bench_models.filled(models[name], given) if kind == "decode" else None for name in names}
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(-options.warm_ups, options.rounds):
            for name in random.sample(names, len(names)):
                taken = bench_models.seconds(models[name], words(name, given), kind, caches[name], options.clock)
                times[name] += [taken] if turn >= 0 else []
                bar.update()
        for row in rows:
            row |= summary(kind, times[row["variant"]], times[names[0]])
    for row in rows if options.memory and not options.compile else ():
        row["peak_mb"] = in_child(__file__, options, f"{model};{shape};{row['variant']}")
    return rows


def print_peak(options: Options) -> None:
    """Print the peak memory of one model's training step above the model at rest, in MB. Runs in a new process."""
    model, shape, name = options.child.split(";")
    batch, length = map(int, shape.split("x"))
    swapped, where = build(model, length, name, options), (options.device, getattr(torch, options.dtype))
    bench_models.seconds(swapped, words(name, bench_models.little(model, *where)), "train")
    given = words(name, bench_models.inputs(model, batch, length, *where))
    swapped.zero_grad()
    print(peak_above(options.device, lambda: bench_models.seconds(swapped, given, "train")))


def tables(rows: list[dict[str, Any]], fits: list[dict[str, Any]]) -> str:
    """Markdown tables: ratios to stock, with stock's own time and memory; then the slopes, if there are any."""
    kinds, lines, stock = [kind for kind in KINDS if any(kind in row for row in rows)], [], rows[0]
    titles, memory = [KINDS[kind] for kind in kinds], ["peak memory"] if "peak_mb" in rows[0] else []
    for row in rows:
        stock = row if row["variant"] == STOCK else stock
        figures = [cell(row, kind, first=row is stock) for kind in kinds]
        figures += [megabytes(row, stock)] if memory else []
        lines.append([f"{row['model']} {row['shape']}", row["variant"], *figures])
    text = markdown(["model, batch x length", "attention", *titles, *memory], lines)
    if fits:
        lines = []
        for fit in fits:
            which = f"{fit['model']} {fit['batch']} x {min(fit['lengths'])}-{max(fit['lengths'])}"
            lines.append([which, fit["variant"], *(f"{fit[kind]:.2f}" if kind in fit else "" for kind in kinds)])
        heads = ["model, batch x tokens", "attention", *(f"slope, {title}" for title in titles)]
        text = f"{text}\n\n{markdown(heads, lines)}"
    return text


def refuse_unknown(options: Options) -> None:
    models, kinds = options.models.split(","), options.kinds.split(",")
    if unknown := [name for name in (*models, *kinds) if name not in (*MODELS, *KINDS)]:
        sys.exit(f"error: unknown {', '.join(unknown)}; models: {', '.join(MODELS)}; kinds: {', '.join(KINDS)}.")


def run(options: Options) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure all that the options ask for: the rows of the first table, and the slopes."""
    torch._dynamo.config.recompile_limit = 64  # layers and kinds of pass share code, and each compiles it anew
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # an error, so that no uncompiled code is timed
    variants = options.variants.split(",")
    names = [STOCK, AGAIN, *variants, *(f"{name}{READABLE}" for name in variants if options.readable)]
    cells = [(model, shape) for model in options.models.split(",") for shape in options.shapes.split(",")]
    rounds = sum(len(bench_models.kinds_of(model, options.kinds)) for model, _ in cells)
    rows: list[dict[str, Any]] = []
    passes = rounds * (options.warm_ups + options.rounds) * len(names) * (1 + options.compile)
    with tqdm(total=passes, unit="pass") as bar:
        for model, shape in cells:
            rows += measure(model, shape, names, options, bar)
    return rows, slopes(rows, ("model", "batch", "variant"), "tokens", KINDS)


def main() -> None:
    (options,) = transformers.HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    torch.set_num_threads(options.threads)
    if options.child:
        print_peak(options)
        return
    refuse_unknown(options)
    rows, fits = run(options)
    write(options.out, options, rows=rows, slopes=fits)
    print(tables(rows, fits))


if __name__ == "__main__":
    main()
