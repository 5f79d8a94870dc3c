"""Compares rules for which layers to convert: the cheapest by sensitivity, the first, the last, or evenly spread ones.

    python recipes/which_layers.py --model HuggingFaceTB/SmolLM2-135M-Instruct --variant simpletron_resl \
        --data data/mixture --counts 5 10 15 20 25 30 --tokens 300000

First, every layer is measured alone, after the fit. Then, for each count and each rule, a new copy of the model gets
the variant in the layers of this rule and is distilled without labels, with the same tokens in the same order. The loss
on the same held-out rows goes to `--out`, with a table and a picture. If the held-out rows have labels, a classifier's
accuracy is the measure. A run that is in the file already is not run again, and an interrupted run goes on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from matplotlib.figure import Figure
from memory_figures import STYLES  # memory_figures.py and records.py lie beside this recipe
from records import open_record, save_record
from transformers import TrainingArguments

from hf_attn_swap import convert, layer_sensitivity, patch_model
from hf_attn_swap.analysis import Lost
from hf_attn_swap.conversion import calibrate
from hf_attn_swap.conversion.config import Distil
from hf_attn_swap.conversion.report import Sensitivity
from hf_attn_swap.conversion.rows import as_rows
from hf_attn_swap.measuring.held_out import HeldOut
from hf_attn_swap.publish.checkpoint import model_class, processor_of, read_config
from hf_attn_swap.text.table import Table
from hf_attn_swap.training import load_rows

RULES = ("auto", "first", "last", "spread")
SENSITIVITY_ROWS = 8  # rows of the pass per layer


@dataclass
class Options:
    """What to convert, and where to write."""

    model: str = field(metadata={"help": "Name on the Hub, or folder."})
    data: str = field(metadata={"help": "Set on the Hub, or folder: its train and test splits are read."})
    variant: str = "simpletron_resl"
    column: str = "text"
    label: str = field(default="label", metadata={"help": "Column of the labels of the test split, if it has one."})
    counts: list[int] = field(default_factory=lambda: [5, 10, 15, 20, 25, 30])
    rules: list[str] = field(default_factory=lambda: list(RULES))
    tokens: int = field(default=300_000, metadata={"help": "Tokens of distillation per run (patches, for images)."})
    fit: str = field(default="map", metadata={"help": '"gain" or "map".'})
    fit_rows: int = field(default=64, metadata={"help": "Rows of the fit before the layers are measured."})
    rank: int = field(default=32, metadata={"help": "Rank of LoRA; 0 trains every weight but the embeddings."})
    learning_rate: float = 7e-4
    hidden: float = field(default=0.0, metadata={"help": "Weight of the hidden states in the loss."})
    logits: float = field(default=1.0, metadata={"help": "Weight of the logits in the loss."})
    length: int = field(default=256, metadata={"help": "Tokens of a row to train on."})
    test_length: int = field(default=512, metadata={"help": "Tokens of a row to measure on."})
    test_rows: int = 32
    dtype: str = "auto"
    bf16: bool = field(default=False, metadata={"help": "Train under bf16 autocast; the weights keep their dtype."})
    seed: int = 0
    out: str = "recipes/figures/which-layers.json"


def chosen(rule: str, count: int, order: list[int]) -> list[int]:
    """The layers of a rule: `order` has all layers, from the cheapest."""
    every = len(order)
    if rule == "auto":
        return sorted(order[:count])
    if rule == "first":
        return list(range(count))
    if rule == "last":
        return list(range(every - count, every))
    if rule == "spread":
        return [place * every // count for place in range(count)]
    raise ValueError(f"a rule is one of {', '.join(RULES)}, got {rule!r}.")


@dataclass
class Study:
    """The data of a comparison, read once."""

    options: Options
    train: list[Any]
    test: list[Any]
    labels: list[Any] | None

    @classmethod
    def read(cls, options: Options) -> Study:
        """Read both splits."""
        rows: dict[str, Dataset] = {
            split: load_rows(options.data, None, split, options.column) for split in ("train", "test")
        }
        train, test = (list(rows[split][options.column]) for split in ("train", "test"))
        labels = list(rows["test"][options.label]) if options.label in rows["test"].column_names else None
        return cls(options, train, test, labels)

    def stock(self) -> tuple[Any, Any]:
        """A new copy of the model, and its tokenizer or image processor."""
        source = self.options.model
        model = model_class(read_config(source), None).from_pretrained(source, dtype=self.options.dtype)
        return model, processor_of(model, source, {})

    def held_out(self, model: Any, processor: Any, count: int) -> list[Any]:
        """The held-out rows, as the model takes them."""
        first = self.test if self.labels is None else self.test[:count]
        rows = as_rows(model, first, processor, length=self.options.test_length).rows
        if self.labels is None:
            return [rows[place] for place in range(min(count, len(rows)))]
        return [{**row, "labels": label} for row, label in zip(rows, self.labels[:count], strict=True)]

    def sensitivity(self) -> Sensitivity:
        """What each layer alone costs after the fit."""
        options = self.options
        model, processor = self.stock()
        train = as_rows(model, self.train, processor, length=options.length)
        test = as_rows(model, self.held_out(model, processor, SENSITIVITY_ROWS), processor)
        held = HeldOut(model, list(test.batches(1)))
        patch_model(model, options.variant)
        calibrate(model, list(train.some(range(options.fit_rows)).batches(8)), fit=options.fit)
        return layer_sensitivity(model, held)

    def run(self, layers: list[int], folder: Path) -> dict[str, Any]:
        """Convert these layers, and return what was lost after each step."""
        options = self.options
        model, processor = self.stock()
        last = Distil(
            rank=options.rank or None,
            learning_rate=options.learning_rate,
            hidden=options.hidden,
            logits=options.logits,
        )
        report = convert(
            model,
            options.variant,
            self.train,
            processor=processor,
            eval_data=self.held_out(model, processor, options.test_rows),
            tokens=options.tokens,
            layers=layers,
            fit=options.fit,
            stages=[last],
            length=options.length,
            output_dir=folder,
            args=TrainingArguments(
                output_dir=str(folder),
                report_to="none",
                seed=options.seed,
                bf16=options.bf16,
                use_cpu=not torch.accelerator.is_available(),
            ),
        )
        return report.to_dict() | {"summary": report.summary}


def table(runs: list[dict[str, Any]], counts: list[int], rules: list[str]) -> Table:
    """A row per count, a column per rule."""
    loss = {(run["rule"], run["count"]): run["loss"] for run in runs}
    rows = [
        (str(count), *(f"{loss[rule, count]:.2%}" if (rule, count) in loss else "-" for rule in rules))
        for count in counts
    ]
    return Table(summary=f"{runs[0]['measure']}, by rule.", header=("layers", *rules), rows=rows)


def picture(runs: list[dict[str, Any]], rules: list[str]) -> Figure:
    """The loss against the number of converted layers, a line per rule; dotted: after the fit alone."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for index, rule in enumerate(rules):
        own = sorted((run for run in runs if run["rule"] == rule), key=lambda run: int(run["count"]))
        points = [run["loss"] for run in own]
        style = STYLES[index % len(STYLES)]
        (line,) = axes.plot([run["count"] for run in own], points, label=rule, linestyle=style, marker="o")
        if rule == "auto":
            fitted = [run["fitted"] for run in own]
            axes.plot(
                [run["count"] for run in own], fitted, label="auto, fit alone", linestyle=":", color=line.get_color()
            )
    axes.set(xlabel="converted layers", ylabel=f"{runs[0]['measure']}, as a share", yscale="log")
    axes.legend()
    axes.grid(alpha=0.3)
    return figure


def main() -> None:
    (options,) = transformers.HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    transformers.utils.logging.set_verbosity_error()
    torch.manual_seed(options.seed)
    path = Path(options.out)
    apart = ("counts", "rules", "out")
    values = {name: value for name, value in asdict(options).items() if name not in apart}
    if not options.bf16:
        del values["bf16"]  # files from before this option stay valid
    record = open_record(path, values, [])
    study = Study.read(options)
    if "sensitivity" not in record:
        record["sensitivity"] = study.sensitivity().to_dict()
        save_record(path, record)
    sensitivity = Sensitivity.from_dict(record["sensitivity"])
    print(sensitivity)
    every = len(sensitivity.alone)
    for count in options.counts:
        for rule in options.rules:
            layers = chosen(rule, count, list(sensitivity.order))
            same = next((run for run in record["runs"] if run["layers"] == layers), None)
            if any((run["rule"], run["count"]) == (rule, count) for run in record["runs"]):
                continue
            if same is None:
                done = study.run(layers, path.with_suffix("") / f"{rule}-{count}")
                fitted = next(step for step in done["steps"] if step["name"].startswith("fit"))
                same = {
                    "layers": layers,
                    "loss": done["loss"],
                    "measure": done["measure"],
                    "fitted": Lost(**fitted["lost"]).degradation,
                    "kl": done["steps"][-1]["lost"]["divergence"],
                    "agreement": done["steps"][-1]["lost"]["agreement"],
                    "tokens": sum(step["tokens"] for step in done["steps"]),
                }
            record["runs"].append({**same, "rule": rule, "count": count, "of": every})
            save_record(path, record)
            print(f"{rule}, {count} layers: {same['measure']} {same['loss']:.2%}")
    print(table(record["runs"], options.counts, options.rules).text())
    picture(record["runs"], options.rules).savefig(path.with_suffix(".png"), dpi=120)


if __name__ == "__main__":
    main()
