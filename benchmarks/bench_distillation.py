"""Measures what a step of distillation costs beside an ordinary LoRA step: `python benchmarks/bench_distillation.py`.

The model is a Llama of the shape of SmolLM2-135M with random weights, or `--model`. An ordinary step trains LoRA
adapters on the swapped model with labels, as `Trainer` does. A distillation step trains the same adapters by KL to the
model's own distribution before the swap. The teacher's pass, a part of that step, is also timed alone. All run in each
round, in random order; the result is the median of the rounds' ratios with its bootstrap 95 % interval. Memory is the
peak of three steps above the model at rest, in a process of its own (on Linux, or with CUDA). Two more rows give the
peak of a whole call of `convert`, with the fit and all measurements: as it is, and with `low_memory=True`.
"""

from __future__ import annotations

import random
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from bench_figures import cell, in_child, megabytes, peak_above, summary, write
from tqdm import tqdm
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

from hf_attn_swap import convert, patch_model
from hf_attn_swap.conversion import DistillationTrainer
from hf_attn_swap.conversion.config import Distil
from hf_attn_swap.conversion.trainable import with_adapters
from hf_attn_swap.text.table import markdown

TEACHER = "the teacher's pass alone"
NAMES = ("ordinary", "distillation")
TIMED = (*NAMES, TEACHER)
CALLS = {"convert": False, "convert, low memory": True}
KIND = "train"


@dataclass
class Options:
    """What to measure. Only this script itself sets `child`."""

    variants: str = "belief,modern_hopfield"
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


def stock_model(options: Options) -> Any:
    """The model before any swap."""
    torch.manual_seed(0)
    if options.model:
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=options.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def trainer(name: str, variant: str, options: Options) -> tuple[Trainer, dict[str, Any]]:
    """A trainer of one kind around a new model, and a batch."""
    stock = stock_model(options)
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


def teach(made: DistillationTrainer, batch: dict[str, Any]) -> float:
    """Seconds of the teacher's pass up to the last hidden states, as a step runs it."""
    start = time.perf_counter()
    plain = made.accelerator.unwrap_model(made.model_wrapped)
    wanted = {"input_ids": batch["input_ids"], "logits_to_keep": torch.tensor([-1]), "use_cache": False}
    with made.accelerator.autocast():
        made.teacher(made.model_wrapped, plain, wanted)
    if next(plain.parameters()).is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def print_peak(options: Options) -> None:
    """Print the peak memory of three steps above the model at rest, in MB. Runs in a new process."""
    variant, name = options.child.split(",", 1)
    if name in CALLS:
        model = stock_model(options).to(options.device)

        def run() -> None:
            call_convert(model, variant, options, low_memory=CALLS[name])
    else:
        made, batch = trainer(name, variant, options)

        def run() -> None:
            for _ in range(3):
                step(made, batch)

    print(peak_above(options.device, run))


def call_convert(model: Any, variant: str, options: Options, *, low_memory: bool) -> None:
    """Convert on random rows; three steps of the distillation, each of as many rows as an ordinary step."""
    ids = torch.randint(0, model.config.vocab_size, (64, options.length))
    convert(
        model,
        variant,
        [{"input_ids": row} for row in ids],
        tokens=3 * options.batch * options.length,
        fit="gain",
        stages=[Distil(rank=options.rank, batch=options.batch)],
        low_memory=low_memory,
        args=TrainingArguments(output_dir=tempfile.mkdtemp(), report_to="none", use_cpu=options.device == "cpu"),
        progress=False,
    )


def measure(variant: str, options: Options) -> list[dict[str, Any]]:
    """A row for the ordinary step, one for the distillation step, and one for the teacher's part of it."""
    made = {name: trainer(name, variant, options) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in TIMED}
    for turn in tqdm(range(-1, options.rounds), desc=variant, unit="round"):
        for name in random.sample(TIMED, len(TIMED)):
            taken = teach(*made["distillation"]) if name == TEACHER else step(*made[name])
            times[name] += [taken] if turn >= 0 else []
    rows: list[dict[str, Any]] = []
    for name in TIMED:
        row: dict[str, Any] = {"variant": variant, "step": name, **summary(KIND, times[name], times[NAMES[0]])}
        if options.memory and name != TEACHER:
            row["peak_mb"] = in_child(__file__, options, f"{variant},{name}")
        rows.append(row)
    if options.memory:
        rows += [
            {"variant": variant, "step": name, "peak_mb": in_child(__file__, options, f"{variant},{name}")}
            for name in CALLS
        ]
    return rows


def _time(row: dict[str, Any], first: dict[str, Any]) -> str:
    return "" if row["step"] in CALLS else cell(row, KIND, first=row is first)


def main() -> None:
    (options,) = transformers.HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(options.threads)
    if options.child:
        print_peak(options)
        return
    results = [measure(variant, options) for variant in options.variants.split(",")]
    write(options.out, options, rows=[row for rows in results for row in rows])
    lines = [
        [row["variant"], row["step"], _time(row, rows[0]), megabytes(row, rows[0])] for rows in results for row in rows
    ]
    print(markdown(["variant", "step with LoRA", "time", "peak memory"], lines))


if __name__ == "__main__":
    main()
