"""Forecasts a multivariate time series with a PatchTST whose attention is swapped, and with the softmax control.

    python recipes/time_series.py recipes/configs/etth1.yaml --variant outeffhop --horizon 24

The recipe repeats the forecasts of OutEffHop (section 4.2) with a PatchTST from random weights; the paper uses
STanHop-Net. The errors are errors of z-scores, whose mean and deviation come from the training rows. Kurtosis and
maximum are taken of the outputs of the layers' parts, per channel, in up to 128 test windows. `--parts` gives the
number of rows for training, validation and test. The validation rows are only used with `--test_split_name
validation`. By default the parts are 14, 5 and 5 months of 30 days of 24 hours, which are the first 17,280 of ETTh1's
17,420 rows.
Axes: T row, C channel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from series import read_series
from tqdm import tqdm
from transformers import PatchTSTConfig, PatchTSTForPrediction, TrainingArguments

from hf_attn_swap.analysis import record
from hf_attn_swap.training import About, Task, compare, load_rows, made_of, scratch_config
from hf_attn_swap.training.arguments import ConversionArguments, DataArguments, ModelArguments, parse

PARTS = ("train", "validation", "test")
OUTPUTS = r"layers\.\d+\.(self_attn\.\w+_proj|norm_sublayer\d|ff\.[013])$"  # each output once: dropout would repeat it


@dataclass(kw_only=True)
class SeriesArguments(DataArguments):
    """The series, its windows, and the other arguments of this recipe alone."""

    columns: list[str] = field(
        default_factory=list, metadata={"help": "Columns to forecast; all but the date if none."}
    )
    date_column: str = field(default="date", metadata={"help": "Column of dates, at even steps."})
    parts: list[int] = field(
        default_factory=lambda: [10080, 3600, 3600],
        metadata={"help": "Number of rows for training, validation and test."},
    )
    horizon: int = field(default=24, metadata={"help": "Number of rows to forecast."})
    context: int = field(default=512, metadata={"help": "Number of rows to forecast from."})
    config_overrides: str = field(default="{}", metadata={"help": "Config values of the model, as JSON."})
    card_name: str = field(default="patchtst", metadata={"help": "Start of the run's name on its card."})

    def __post_init__(self) -> None:
        if min(self.horizon, self.context) < 1:
            raise ValueError(f"horizon and context must be at least 1, got {self.horizon} and {self.context}.")
        usual = DataArguments(dataset_name="any")
        for name in (
            "train_file",
            "train_split_name",
            "max_train_samples",
            "max_eval_samples",
            "label_column_name",
            "metrics",
        ):
            if getattr(self, name) != getattr(usual, name):
                raise ValueError(f"--{name} has no place here: --dataset_name names the series, --parts cuts it.")
        if self.test_split_name not in PARTS[1:]:
            raise ValueError(f"--test_split_name is validation or test, got {self.test_split_name!r}.")
        self.max_seq_length = self.context
        super().__post_init__()

    @property
    def input_columns(self) -> list[str]:
        """The columns to forecast, as they were given."""
        return self.columns

    def read(self) -> torch.Tensor:
        """The series (T,C), from the only split of a set or from a file."""
        table = load_rows(self.dataset_name or "", self.dataset_config_name, "train", self.date_column)
        if len(self.parts) != len(PARTS) or min(self.parts) < 1 or len(table) < sum(self.parts):
            raise ValueError(f"--parts are rows of {', '.join(PARTS)}, {len(table)} in all at most, got {self.parts}.")
        scores = read_series(table, self.date_column, self.columns, self.parts[0])
        return torch.tensor(scores, dtype=torch.float32)

    def windows(self, part: str) -> Dataset:
        """The first row of every window whose future lies in a part. The past may reach back into the part before."""
        begin, rows = sum(self.parts[: PARTS.index(part)]), self.parts[PARTS.index(part)]
        starts = range(max(begin - self.context, 0), begin + rows - self.context - self.horizon + 1)
        if not starts:
            raise ValueError(f"{part}: {rows} rows hold no context {self.context} + horizon {self.horizon}; lower one.")
        return Dataset.from_dict({"start": list(starts)})


def collate(rows: list[dict[str, int]], series_TC: torch.Tensor, context: int, horizon: int) -> dict[str, torch.Tensor]:
    """Cut the windows that begin at these rows."""
    whole = torch.stack([series_TC[row["start"] : row["start"] + context + horizon] for row in rows])
    return {"past_values": whole[:, :context], "future_values": whole[:, context:]}


@torch.no_grad()
def predict(trainer: Any, test: Dataset, power: int = 2) -> tuple[list[float], list[float]]:
    """The mean squared error (with power 1, the mean absolute error) of every held-out window, and zeros."""
    model, losses = trainer.model.eval(), []
    for batch in tqdm(trainer.get_test_dataloader(test), desc="forecast", unit="batch", leave=False):
        missed = model(past_values=batch["past_values"]).prediction_outputs - batch["future_values"]
        losses += trainer.accelerator.gather_for_metrics(missed.abs().pow(power).mean((1, 2))).tolist()
    return losses, [0.0] * len(losses)


def figures(trainer: Any, test: Dataset) -> dict[str, float]:
    """The mean absolute error and the outliers. Every process computes the outliers itself."""
    outlier_figures = outliers(trainer.model.eval(), trainer.data_collator, test, OUTPUTS)
    return {"mae": float(np.mean(predict(trainer, test, power=1)[0])), **outlier_figures}


@torch.no_grad()
def outliers(model: Any, cut: Any, test: Dataset, outputs: str) -> dict[str, float]:
    """Kurtosis and maximum of these outputs, in up to 128 test windows. `cut` makes a batch of first rows."""
    rows = test.select(range(0, len(test), -(-len(test) // 128)))
    with record(model, modules=outputs) as recording:
        for start in range(0, len(rows), 32):
            batch = cut(list(rows.select(range(start, min(start + 32, len(rows))))))
            model(past_values=batch["past_values"].to(model.device))
    return {"kurtosis": recording.kurtosis, "max_inf_norm": recording.max_inf_norm}


def build_task(model: ModelArguments, data: SeriesArguments) -> Task:
    """Read and check the data and the options, before any training."""
    series_TC = data.read()
    sizes = {"context_length": data.context, "prediction_length": data.horizon, "num_input_channels": len(series_TC.T)}
    config = scratch_config(model.model_name_or_path, data.config_overrides, **sizes, loss="mse").to_dict()
    if config["model_type"] != PatchTSTConfig.model_type:
        raise ValueError(
            f"--model_name_or_path must be {PatchTSTConfig.model_type}, or a model of this kind, "
            f"not {model.model_name_or_path}."
        )
    return Task(
        load=lambda: PatchTSTForPrediction(PatchTSTConfig(**config)),
        train=data.windows("train"),
        test=data.windows(data.test_split_name),
        collate=functools.partial(collate, series_TC=series_TC, context=data.context, horizon=data.horizon),
        metrics=["mse"],
        predict=predict,
        settings=data.settings,
        scratch=made_of(model.model_name_or_path, data.config_overrides),
        figures=figures,
    )


def main(argv: list[str] | None = None) -> None:
    classes = (ModelArguments, SeriesArguments, ConversionArguments, TrainingArguments)
    model, data, conversion, training = parse(classes, argv)
    training.remove_unused_columns, training.label_names = False, ["future_values"]  # the collator reads first rows
    about = About(
        prefix=data.card_name,
        task="time-series-forecasting",
        auto_class="PatchTSTForPrediction",
        intended_use="Compares attentions on this series; a forecaster of its z-scores.",
        language=(),
        block=data.horizon,  # windows whose futures overlap have similar errors
    )
    if compare(lambda: build_task(model, data), about, model, data, conversion, training) is not None:
        task = build_task(model, data)
        whole = task.collate(list(task.test))
        missed = whole["future_values"] - whole["past_values"][:, -1:]
        print(f"repeating the last value: mse {missed.square().mean():.4f}, mae {missed.abs().mean():.4f}")


if __name__ == "__main__":
    main()
