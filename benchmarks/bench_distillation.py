"""Measures what a step of distillation costs beside an ordinary LoRA step: `python benchmarks/bench_distillation.py`.

The model is a Llama of the shape of SmolLM2-135M with random weights, or `--model`. An ordinary step trains LoRA
adapters on the swapped model with labels, as `Trainer` does. A distillation step trains the same adapters by KL to the
model's own distribution before the swap. Both run in each round, in random order; the result is the median of the
rounds' ratios with its bootstrap 95 % interval. Memory is the peak of three steps above the model at rest, in a process
of its own (on Linux, or with CUDA).
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from bench_figures import cell, in_child, markdown, megabytes, peak, summary, write
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import DistillationTrainer
from hf_attn_swap.conversion.take import with_adapters

NAMES = ("ordinary", "distillation")
KIND = "train"


@dataclass
class Options:
    """What to measure. Only this script itself sets `child`."""

    variants: str = "belief,mha"
    model: str = ""
    layers: int = 30
    vocabulary: int = 49152
    batch: int = 2
    length: int = 512
    rank: int = 32
    rounds: int = 9
    threads: int = 2
    bf16: bool = False
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    memory: bool = True
    out: str = "bench-distillation.json"
    child: str = ""


def trainer(name: str, variant: str, options: Options) -> tuple[Trainer, dict[str, Any]]:
    """A trainer of one kind around a new model, and a batch."""
    torch.manual_seed(0)
    if options.model:
        stock = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    else:
        config = LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=options.layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            tie_word_embeddings=True,
        )
        stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    student = with_adapters(patch_model(stock, variant), options.rank)
    args = TrainingArguments(
        output_dir=tempfile.mkdtemp(), report_to="none", use_cpu=options.device == "cpu", bf16=options.bf16
    )
    made = (DistillationTrainer if name == "distillation" else Trainer)(student, args)
    made.model_wrapped = made.accelerator.prepare(made.model)
    made.create_optimizer()
    ids = torch.randint(0, stock.config.vocab_size, (options.batch, options.length), device=options.device)
    return made, {"input_ids": ids, "labels": ids}


def step(made: Trainer, batch: dict[str, Any]) -> float:
    """Seconds of one step."""
    start = time.perf_counter()
    made.model_wrapped.train()
    made.accelerator.backward(made.compute_loss(made.model_wrapped, dict(batch)))
    made.optimizer.step()
    made.optimizer.zero_grad()
    if next(made.model.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def print_peak(options: Options) -> None:
    """Print the peak memory of three steps above the model at rest, in MB. Runs in a new process."""
    name, variant = options.child.split(",")
    made, batch = trainer(name, variant, options)
    before = peak(options.device)
    for _ in range(3):
        step(made, batch)
    print((peak(options.device) - before) / 2**20)


def measure(variant: str, options: Options) -> list[dict[str, Any]]:
    """A row for the ordinary step and a row for the distillation step."""
    made = {name: trainer(name, variant, options) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in tqdm(range(-1, options.rounds), desc=variant, unit="round"):
        for name in random.sample(NAMES, len(NAMES)):
            taken = step(*made[name])
            times[name] += [taken] if turn >= 0 else []
    rows: list[dict[str, Any]] = []
    for name in NAMES:
        row: dict[str, Any] = {"variant": variant, "step": name, **summary(KIND, times[name], times[NAMES[0]])}
        if options.memory:
            row["peak_mb"] = in_child(__file__, options, f"{name},{variant}")
        rows.append(row)
    return rows


def main() -> None:
    (options,) = transformers.HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    if options.child:
        print_peak(options)
        return
    found = [measure(variant, options) for variant in options.variants.split(",")]
    write(options.out, options, rows=[row for rows in found for row in rows])
    lines = [
        [row["variant"], row["step"], cell(row, KIND, first=row is rows[0]), megabytes(row, rows[0])]
        for rows in found
        for row in rows
    ]
    print(markdown(["variant", "step with LoRA", "time", "peak memory"], lines))


if __name__ == "__main__":
    main()
