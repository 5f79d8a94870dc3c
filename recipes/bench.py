"""Time and memory of every variant against the stock SDPA model, in one interleaved run: `python recipes/bench.py`.

Whole layers of the real width of BERT-base and GPT-2 with random weights and a tiny vocabulary, so that the layers
are what is measured. Models take turns in random order; a figure is the median over rounds of the ratio to stock in
the same round, with its bootstrap 95 % interval. "stock again" is a second copy: the noise floor. Memory is measured
in a process per model (on Linux, or with CUDA): the peak of a training step above the model at rest.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from hf_attn_swap import list_variants, patch_model

STOCK, AGAIN = "stock", "stock again"


@dataclass
class Options:
    """What to measure; `child` is for this script's own use."""

    variants: str = ",".join((*list_variants(), "outeffhop+gated", "mha+belief"))
    models: str = "bert,gpt2"
    shapes: str = "8x128,2x512,1x2048"
    layers: int = 2
    width: int = 768
    rounds: int = 15
    threads: int = 2
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "float32"
    out: str = "bench.json"
    child: str = ""


def build(model: str, length: int, name: str, options: Options) -> transformers.PreTrainedModel:
    """Layers of this model for sequences of `length`, stock or with a variant in them; dropout is off."""
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": options.layers, "num_attention_heads": options.width // 64}
    sizes |= {"vocab_size": 100, "hidden_size": options.width, "max_position_embeddings": length}
    bert = {**sizes, "intermediate_size": 4 * options.width}
    gpt2 = {**sizes, "bos_token_id": 0, "eos_token_id": 1}
    config: Any = transformers.BertConfig(**bert) if model == "bert" else transformers.GPT2Config(**gpt2)
    made = transformers.AutoModel.from_config(config).to(options.device, getattr(torch, options.dtype)).eval()
    return made if name in (STOCK, AGAIN) else patch_model(made, name)


def step(model: transformers.PreTrainedModel, ids: torch.Tensor, train: bool) -> float:
    """Seconds of one forward pass, with its backward pass if `train`."""
    model.zero_grad()
    start = time.perf_counter()
    with torch.set_grad_enabled(train):
        out = model(input_ids=ids).last_hidden_state
        if train:
            out.square().mean().backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def interval(ratios: list[float]) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(1000))
    return medians[25], medians[974]


def measure(model: str, shape: str, names: list[str], options: Options, bar: Any) -> list[dict[str, Any]]:
    """One row per model in `names`, with ratios to the first."""
    batch, length = map(int, shape.split("x"))
    ids = torch.randint(0, 100, (batch, length), device=options.device)
    models = {name: build(model, length, name, options) for name in names}
    rows = [{"model": model, "shape": shape, "variant": name} for name in names]
    for kind in ("forward", "train"):
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(options.rounds + 1):
            for name in random.sample(names, len(names)):
                seconds = step(models[name], ids, kind == "train")
                times[name] += [seconds] if turn else []  # the first round warms up
                bar.update()
        for row in rows:
            ratios = [a / b for a, b in zip(times[str(row["variant"])], times[STOCK], strict=True)]
            milliseconds = 1e3 * statistics.median(times[str(row["variant"])])
            row |= {kind: statistics.median(ratios), f"{kind}_95": interval(ratios), f"{kind}_ms": milliseconds}
    for row in rows:
        flags = [f"--{key}={value}" for key, value in asdict(options).items() if key != "child"]
        command = [sys.executable, __file__, *flags, f"--child={model},{shape},{row['variant']}"]
        row["peak_mb"] = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    return rows


def print_peak(options: Options) -> None:
    """In a process of its own: MB of one model's training step above the model at rest."""
    model, shape, name = options.child.split(",")
    batch, length = map(int, shape.split("x"))
    swapped = build(model, length, name, options)
    step(swapped, torch.zeros(1, 8, dtype=torch.long, device=options.device), train=True)
    before = peak(options)
    step(swapped, torch.zeros(batch, length, dtype=torch.long, device=options.device), train=True)
    print((peak(options) - before) / 2**20)


def peak(options: Options) -> int:
    """The most memory this process has held so far, in bytes."""
    if options.device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status").read_text()  # getrusage would count the process that started this one
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown: ratios to stock, and the figures of stock itself."""
    lines = ["| model, batch x length | attention | forward | training step | peak memory |", "|---|---|---|---|---|"]
    stock: dict[str, Any] = {}
    for row in rows:
        speed = [f"{row[k]:.2f} [{row[f'{k}_95'][0]:.2f}, {row[f'{k}_95'][1]:.2f}]" for k in ("forward", "train")]
        if row["variant"] == STOCK:
            stock, speed = row, [f"{row[f'{k}_ms']:.0f} ms" for k in ("forward", "train")]
        memory = f"{row['peak_mb']:.0f} MB" if row is stock else f"{row['peak_mb'] / max(stock['peak_mb'], 1e-9):.2f}"
        lines.append(f"| {row['model']} {row['shape']} | {row['variant']} | {speed[0]} | {speed[1]} | {memory} |")
    return "\n".join(lines)


if __name__ == "__main__":
    (chosen,) = transformers.HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    torch.set_num_threads(chosen.threads)
    if chosen.child:
        sys.exit(print_peak(chosen))  # type: ignore[func-returns-value]  # None is success
    everyone = [STOCK, AGAIN, *chosen.variants.split(",")]
    cells = [(model, shape) for model in chosen.models.split(",") for shape in chosen.shapes.split(",")]
    measured: list[dict[str, Any]] = []
    with tqdm(total=len(cells) * 2 * (chosen.rounds + 1) * len(everyone), unit="step") as progress:
        for cell in cells:
            measured += measure(*cell, everyone, chosen, progress)
    machine = {"machine": platform.platform(), "torch": torch.__version__, "transformers": transformers.__version__}
    record = json.dumps({"options": asdict(chosen), "machine": machine, "rows": measured}, indent=2)
    Path(chosen.out).write_text(f"{record}\n", encoding="utf-8")
    print(table(measured))
