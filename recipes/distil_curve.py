r"""Draws what a swap loses against the tokens of distillation: does the gap close, and how fast?

    python recipes/sample_tokens.py MODEL data/own --tokens 10000000
    python recipes/distil_curve.py --model MODEL --data data/own --tokens 10000000 \
        --variants belief modern_hopfield simpletron_resl

The data are rows of token ids, or texts, which the model's tokenizer turns into rows of `--length` tokens:

    python recipes/distil_curve.py --model HuggingFaceTB/SmolLM2-135M-Instruct --data data/mixture \
        --test_data data/wikitext-2 --tokens 160000 --rows 4 --test_rows 32 --learning_rate 3e-4 \
        --variants simpletron_resl --out recipes/figures/distil-curve-smollm2.json

For each variant a new copy of the model is swapped, fitted (as `FITS` says) and distilled without
labels on rows of token ids. Every weight trains. After a short rise, the learning rate is constant, or falls with the
square root of the steps (`--lr_scheduler_type inverse_sqrt`), so that every budget has seen the same rule.
At budgets in equal ratios, KL to the original model and the share of equal first choices are measured on the test rows.
The points and a picture go to `--out`. A variant that is in the file already is not run again.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, load_dataset
from matplotlib.figure import Figure
from memory_figures import STYLES  # memory_figures.py and records.py lie beside this recipe
from records import open_record, save_record
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, TrainingArguments

from hf_attn_swap import patch_model
from hf_attn_swap.analysis import lost
from hf_attn_swap.conversion import DistillationTrainer, calibrate
from hf_attn_swap.layer.registry import canonical_name
from hf_attn_swap.text.typed import parse_layers

FITS = {"modern_hopfield": "gain", "simpletron": "gain", "simpletron_res": "gain", "simpletron_resl": "map"}


@dataclass
class Options:
    """What to distil, and where to write. `layers` is for variants with an @, as in simpletron_resl@1,3."""

    model: str = field(metadata={"help": "Name on the Hub, or folder, of a causal language model."})
    data: str = field(metadata={"help": "Folder with train.parquet and test.parquet, of input_ids or of text."})
    test_data: str = field(default="", metadata={"help": "Folder with another test.parquet."})
    length: int = field(default=256, metadata={"help": "Tokens per row, if the data are texts."})
    variants: list[str] = field(default_factory=lambda: ["belief", "modern_hopfield", "simpletron_resl"])
    options: str = field(default="{}", metadata={"help": "Options by variant, as JSON."})
    tokens: int = 1_000_000
    rows: int = field(default=8, metadata={"help": "Rows per step."})
    test_rows: int = 128
    points: int = field(default=3, metadata={"help": "Measurements per factor of ten."})
    learning_rate: float = 1e-3
    lr_scheduler_type: str = field(default="constant_with_warmup", metadata={"help": "Such as inverse_sqrt."})
    warmup_steps: int = 20
    seed: int = 0
    out: str = "recipes/figures/distil-curve.json"


class Curve(TrainerCallback):  # type: ignore[misc]  # transformers leaves it untyped
    """Measures the loss of the swap at budgets in equal ratios.

    Args:
        measure: a function that returns the figures of the model as it is.
        tokens: tokens per step.
        points: measurements per factor of ten.
    """

    def __init__(self, measure: Any, tokens: int, points: int) -> None:
        self.measure, self.tokens, self.ratio = measure, tokens, 10 ** (1 / points)
        self.next = 10_000.0
        self.points = [{"tokens": 0, **measure()}]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure if the next budget is reached, and after the last step."""
        seen = state.global_step * self.tokens
        if seen >= self.next or state.global_step == state.max_steps:
            self.points.append({"tokens": seen, **self.measure()})
            while self.next <= seen:
                self.next *= self.ratio


def label(variant: str) -> str:
    """The variant under its canonical name, with its layers."""
    name, at, layers = variant.partition("@")
    return canonical_name(name) + at + layers


def token_rows(file: Path, options: Options, *, mixed: bool = False) -> Dataset:
    """The rows of token ids in a file. Texts are joined, and cut into rows of `length` tokens, `mixed` or in order."""
    data = load_dataset("parquet", data_files=str(file), split="train")
    if "input_ids" in data.column_names:
        return data
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    ids = [number for text in data["text"] for number in tokenizer(text)["input_ids"]]
    starts = range(0, len(ids) - options.length + 1, options.length)
    rows = [ids[start : start + options.length] for start in starts]
    if mixed:
        random.Random(options.seed).shuffle(rows)
    return Dataset.from_dict({"input_ids": rows})


def run(variant: str, options: Options) -> list[dict[str, float]]:
    """The points of one variant."""
    name, _, layers = variant.partition("@")
    train = token_rows(Path(options.data) / "train.parquet", options, mixed=True)
    test = token_rows(Path(options.test_data or options.data) / "test.parquet", options)
    stock = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    options_of = {label(name): values for name, values in json.loads(options.options).items()}
    patch_model(model, name, layers=parse_layers(layers or None), **options_of.get(variant, {}))
    held = torch.tensor(test["input_ids"][: options.test_rows])
    if name in FITS:
        first = torch.tensor(train["input_ids"][:64]).split(16)
        calibrate(model, [{"input_ids": ids} for ids in first], fit=FITS[name], progress=False)

    def measure() -> dict[str, float]:
        loss = lost(model, [{"input_ids": ids} for ids in held.split(16)], stock=stock)
        assert loss.divergence is not None
        assert loss.agreement is not None
        assert loss.ratio is not None
        return {"kl": loss.divergence, "agreement": loss.agreement, "perplexity_ratio": loss.ratio}

    length = len(train[0]["input_ids"])
    curve = Curve(measure, options.rows * length, options.points)
    args = TrainingArguments(
        output_dir=str(Path(options.out).with_suffix("") / variant),
        per_device_train_batch_size=options.rows,
        max_steps=max(1, options.tokens // (options.rows * length)),
        learning_rate=options.learning_rate,
        lr_scheduler_type=options.lr_scheduler_type,
        warmup_steps=options.warmup_steps,
        weight_decay=0.0,
        seed=options.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    rows = train.with_format("torch")
    DistillationTrainer(model, args, train_dataset=rows, trainable="all", callbacks=[curve]).train()
    return curve.points


def picture(curves: dict[str, list[dict[str, float]]]) -> Figure:
    """KL to the original model against tokens; the points at 0 tokens stand at the left edge."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, (variant, points) in enumerate(curves.items()):
        x = [max(point["tokens"], 3_000) for point in points]
        axes.plot(x, [point["kl"] for point in points], label=variant, linestyle=STYLES[index % len(STYLES)])
    axes.set(xscale="log", yscale="log", xlabel="tokens of distillation", ylabel="KL to the original, nats per token")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def main() -> None:
    (options,) = transformers.HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    transformers.utils.logging.set_verbosity_error()
    path = Path(options.out)
    values = {name: value for name, value in asdict(options).items() if name not in ("variants", "out")}
    for name in ("lr_scheduler_type", "warmup_steps"):
        if values[name] == getattr(Options, name):
            del values[name]  # files from before these options stay valid
    record = open_record(path, values, {})
    record["runs"] = {label(variant): points for variant, points in record["runs"].items()}
    for variant in map(label, options.variants):
        if variant not in record["runs"]:
            record["runs"][variant] = run(variant, options)
        save_record(path, record)
        last = record["runs"][variant][-1]
        print(f"{variant}: KL {last['kl']:.4f}, agreement {last['agreement']:.1%} after {last['tokens']:,} tokens")
    picture(record["runs"]).savefig(path.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
