"""Trains STanHop-Net on a series with one retrieval after another, and compares errors, outliers and 8 bits.

    python recipes/stanhop.py --dataset data/ETTh1.csv --horizon 24 --out runs/stanhop-24

It repeats the study of OutEffHop (section 4.2; Table 1, last block; Table 2) at the size and budget of the options: a
model from random weights for each retrieval and seed. Series, parts and z-scores are those of time_series.py, and so
are the figures: errors of z-scores, and kurtosis and largest activation of the outputs of the decoder layers' parts.
W8A8 is the papers' protocol (`fake_w8a8`), with ranges from training windows. A run is kept in `--out` when it ends,
and is not repeated.

The difference to the first retrieval has a 95 % interval: of errors by a bootstrap over blocks of test windows whose
futures overlap, of kurtosis and largest activation by Student's t over the seeds. For both, the record says whether all
seeds agree on the sign.
"""

from __future__ import annotations

import resource
import time
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from matplotlib.figure import Figure
from memory_figures import STYLES, start  # these files lie beside this recipe
from records import Record, open_record, save_record
from scipy.stats import t as student
from time_series import SeriesArguments, collate, outliers
from transformers import HfArgumentParser, Trainer, TrainingArguments, set_seed

from hf_attn_swap.memory import STanHopConfig, STanHopForPrediction
from hf_attn_swap.quantization import fake_w8a8
from hf_attn_swap.text.table import markdown
from hf_attn_swap.training.metrics import paired_interval

# The outputs of the parts of the decoder layers, each once.
OUTPUTS = r"decoder\.\d+\.(.*\.)?(query|key|value|out|norm\d|mlp\d?\.[012])$"
ERRORS = ("mse", "mae", "w8a8")
OUTLIERS = ("kurtosis", "max_inf_norm")
RETRIEVALS = ["softmax", "sparsemax", "generalized_sparse", "outeffhop", "clipped_softmax"]
RETRIEVALS += ["outeffhop+clipped_softmax", "gated", "outeffhop+gated"]


@dataclass(kw_only=True)
class Options:
    """The series, the model and its training."""

    dataset: Path = field(metadata={"help": "File of the series."})
    out: Path = field(default=Path("stanhop"), metadata={"help": "Folder for the record, the errors and the picture."})
    retrievals: list[str] = field(
        default_factory=lambda: list(RETRIEVALS), metadata={"help": "Retrievals; the first is the control."}
    )
    horizon: int = field(default=24, metadata={"help": "Number of rows to forecast."})
    context: int = field(default=168, metadata={"help": "Number of rows to forecast from."})
    parts: list[int] = field(
        default_factory=lambda: [10080, 3600, 3600],
        metadata={"help": "Number of rows for training, validation and test."},
    )
    every: int = field(default=4, metadata={"help": "Every n-th test window is forecast."})
    patch: int = field(default=12, metadata={"help": "Rows of a patch."})
    merge: int = field(default=4, metadata={"help": "Patches merged between two encoder blocks."})
    width: int = field(default=32, metadata={"help": "Width of the model; its MLPs are twice as wide."})
    layers: int = field(default=2, metadata={"help": "Encoder blocks; there is one decoder layer more."})
    dropout: float = field(default=0.1, metadata={"help": "Dropout."})
    steps: int = field(default=200, metadata={"help": "Training steps."})
    batch: int = field(default=16, metadata={"help": "Windows of a step."})
    learning_rate: float = field(default=3e-3, metadata={"help": "Highest learning rate of AdamW."})
    seeds: int = field(default=5, metadata={"help": "Number of draws of weights and windows."})

    def __post_init__(self) -> None:
        if self.horizon % self.every or min(self.seeds, self.steps, self.batch, self.every) < 1:
            raise ValueError(
                f"--every must divide --horizon, and all are at least 1, as --seeds, --steps and --batch are; got "
                f"{self.every} and {self.horizon}, {self.seeds}, {self.steps} and {self.batch}."
            )


@dataclass(frozen=True)
class Data:
    """The series (T,C), and the first rows of the windows of each part."""

    series: torch.Tensor
    options: Options
    train: Dataset
    test: Dataset

    def batch(self, rows: list[dict[str, int]]) -> dict[str, torch.Tensor]:
        """Cut the windows that begin at these rows."""
        return collate(rows, self.series, self.options.context, self.options.horizon)

    def batches(self, windows: Dataset, size: int = 256) -> list[dict[str, torch.Tensor]]:
        """All of these windows."""
        return [
            self.batch(list(windows.select(range(i, min(i + size, len(windows))))))
            for i in range(0, len(windows), size)
        ]


def read(options: Options) -> Data:
    """Read and check the series."""
    series = SeriesArguments(
        dataset_name=str(options.dataset), parts=options.parts, horizon=options.horizon, context=options.context
    )
    test = series.windows("test")
    return Data(series.read(), options, series.windows("train"), test.select(range(0, len(test), options.every)))


def configured(retrieval: str, data: Data) -> STanHopConfig:
    options = data.options
    return STanHopConfig(
        num_input_channels=data.series.shape[1],
        context_length=options.context,
        prediction_length=options.horizon,
        patch_length=options.patch,
        merge_size=options.merge,
        d_model=options.width,
        ffn_dim=2 * options.width,
        encoder_layers=options.layers,
        dropout=options.dropout,
        retrieval=retrieval,
    )


@torch.no_grad()
def errors(model: STanHopForPrediction, data: Data) -> torch.Tensor:
    """The mean squared and the mean absolute error (2,W) of each test window."""
    errors_of_batches = []
    for batch in data.batches(data.test):
        missed = model(batch["past_values"]).prediction_outputs - batch["future_values"]
        errors_of_batches.append(torch.stack([missed.square().mean((1, 2)), missed.abs().mean((1, 2))]))
    return torch.cat(errors_of_batches, 1)


def train(retrieval: str, seed: int, data: Data) -> tuple[STanHopForPrediction, list[float]]:
    """A trained model in evaluation mode, and the mean training loss of each twentieth of the steps."""
    options = data.options
    set_seed(seed)
    model = STanHopForPrediction(configured(retrieval, data))
    arguments = TrainingArguments(
        output_dir=str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        learning_rate=options.learning_rate,
        warmup_steps=options.steps // 10,
        seed=seed,
        save_strategy="no",
        logging_steps=max(options.steps // 20, 1),
        report_to="none",
        remove_unused_columns=False,
        label_names=["future_values"],
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, data.batch, train_dataset=data.train)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return model.cpu().eval(), [float(loss) for loss in losses]


def run(retrieval: str, seed: int, data: Data) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """What one model gives, and its errors (3,W) per test window: squared, absolute, and squared in 8 bits."""
    began = time.process_time()
    model, losses = train(retrieval, seed, data)
    plain = errors(model, data)
    ranges = data.train.shuffle(seed=0).select(range(min(512, len(data.train))))
    batches = [{"past_values": batch["past_values"]} for batch in data.batches(ranges, 64)]
    with torch.no_grad(), fake_w8a8(model, batches):
        rounded = errors(model, data)[:1]
    table = torch.cat([plain, rounded]).numpy()
    alphas = [float(layer.alpha.detach()) for layer in model.modules() if getattr(layer, "alpha", None) is not None]
    figures = {
        **dict(zip(ERRORS, table.mean(1).tolist(), strict=True)),
        **outliers(model, data.batch, data.test, OUTPUTS),
        "losses": losses,
        "seconds": time.process_time() - began,
    }
    return figures | ({"alphas": alphas} if alphas else {}), table


def compared(record: Record, tables: dict[tuple[str, int], Any], options: Options) -> dict[str, Any]:
    """Each retrieval's difference to the first one: mean, low and high, and whether all seeds agree on the sign."""
    first, seeds, comparisons = options.retrievals[0], range(options.seeds), {}
    for name in options.retrievals[1:]:
        ours, theirs = ([record["runs"][f"{retrieval}/{seed}"] for seed in seeds] for retrieval in (name, first))
        comparisons[name] = {}
        for place, figure in enumerate([*ERRORS, *OUTLIERS]):
            pairs = [mine[figure] - other[figure] for mine, other in zip(ours, theirs, strict=True)]
            if figure in OUTLIERS:
                interval = over_seeds(pairs)
            else:
                lists = ([tables[retrieval, seed][place] for seed in seeds] for retrieval in (name, first))
                mine, other = lists
                interval = window_interval(mine, other, options.horizon // options.every)
            comparisons[name][figure] = {
                "difference": interval,
                "agree": all(pair > 0 for pair in pairs) or all(pair < 0 for pair in pairs),
            }
    return comparisons


def window_interval(ours: list[Any], theirs: list[Any], block: int) -> list[float] | None:
    """The difference of the means with its interval over test windows; None for fewer than ten blocks."""
    if len(ours[0]) < 10 * block:
        return None
    return list(paired_interval("mse", ours, theirs, [0.0] * len(ours[0]), block=block))


def over_seeds(pairs: list[float]) -> list[float] | None:
    """The mean of the seeds' differences with its 95 % interval by Student's t; None for a single seed."""
    if len(pairs) < 2:
        return None
    half = student.ppf(0.975, len(pairs) - 1) * np.std(pairs, ddof=1) / len(pairs) ** 0.5
    return [float(np.mean(pairs)), float(np.mean(pairs) - half), float(np.mean(pairs) + half)]


def picture(record: Record, options: Options) -> Figure:
    """The training losses, as means over the seeds."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="training step", ylabel="mean squared error of z-scores", yscale="log")
    for name, style in zip(options.retrievals, cycle(STYLES), strict=False):
        losses = [record["runs"][f"{name}/{seed}"]["losses"] for seed in range(options.seeds)]
        steps = np.linspace(options.steps / len(losses[0]), options.steps, len(losses[0]))
        axes.plot(steps, np.mean(losses, 0), ls=style, label=name)
    axes.legend(fontsize="small")
    return figure


def table(record: Record, options: Options) -> str:
    """A row per retrieval: mean and standard deviation over the seeds."""
    rows = []
    for name in options.retrievals:
        runs = [record["runs"][f"{name}/{seed}"] for seed in range(options.seeds)]
        values = ([run[figure] for run in runs] for figure in (*ERRORS, *OUTLIERS))
        rows.append(
            (
                name,
                *(
                    f"{np.mean(numbers):.3f} ± {np.std(numbers, ddof=min(1, len(numbers) - 1)):.3f}"
                    for numbers in values
                ),
            )
        )
    return markdown(("retrieval", *ERRORS, *OUTLIERS), rows)


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    data = read(options)
    settings = asdict(options) | {"out": "", "retrievals": "", "seeds": 0, "model": "stanhop", "data": options.dataset}
    del settings["dataset"]
    record = open_record(options.out / "stanhop.json", settings, {})
    tables = {}
    for seed in range(options.seeds):
        for name in options.retrievals:
            key, path = f"{name}/{seed}", options.out / f"{name}-{seed}.npy"
            if key not in record["runs"] or not path.exists():
                record["runs"][key], errors_3W = run(name, seed, data)
                np.save(path, errors_3W)
                record["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
                save_record(options.out / "stanhop.json", record)
            tables[name, seed] = np.load(path)
    whole = data.batch(list(data.test))
    future, past = whole["future_values"], whole["past_values"]
    simple = {
        "last value": past[:, -1:],
        "mean of the past": past.mean(1, keepdim=True),
        "mean of the training part": 0,
    }
    record["simple"] = {
        name: [(future - guess).square().mean().item(), (future - guess).abs().mean().item()]
        for name, guess in simple.items()
    }
    record["test_windows"], record["parameters"] = len(data.test), parameters(data)
    record["compared"] = compared(record, tables, options)
    save_record(options.out / "stanhop.json", record)
    picture(record, options).savefig(options.out / "stanhop.png", dpi=150)
    print(table(record, options))
    for name, (squared, absolute) in record["simple"].items():
        print(f"{name}: mse {squared:.3f}, mae {absolute:.3f}")


def parameters(data: Data) -> int:
    """The parameters of a model with the first retrieval."""
    model = STanHopForPrediction(configured(data.options.retrievals[0], data))
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    start(main)
