"""Forecast a multivariate time series by a PatchTST with a swapped attention, and the softmax control beside it.

    python recipes/time_series.py recipes/configs/etth1.yaml --variant outeffhop --horizon 24

The forecasts of OutEffHop (section 4.2) by PatchTST from random weights (there: STanHop-Net). Errors are of z-scores by
the training rows; kurtosis and maximum are of what the layers' parts give out, per channel, in up to 128 test windows.
`--parts` are the rows of training, validation (idle without `--test_split validation`) and test: unless said otherwise
14, 5 and 5 months of 30 days of 24 hours, the first 17,280 of ETTh1's 17,420. Axes: T row, C channel.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tqdm import tqdm
from transformers import PatchTSTConfig, PatchTSTForPrediction, TrainingArguments

from hf_attn_swap.analysis import record
from hf_attn_swap.training import About, Task, compare, load_rows, scratch_config
from hf_attn_swap.training.arguments import ConversionArguments, DataArguments, ModelArguments, parse

PARTS = ("train", "validation", "test")
KIND: dict[str, Any] = {"task": "time-series-forecasting", "auto_class": "PatchTSTForPrediction"}
KIND |= {"relation": "scratch", "language": ()}
OUTPUTS = r"layers\.\d+\.(self_attn\.\w+_proj|norm_sublayer\d|ff\.[013])$"  # once each: dropout would repeat its input


@dataclass(kw_only=True)
class SeriesArguments(DataArguments):
    """The series, its windows, and what else is this recipe's own."""

    columns: list[str] = field(default_factory=list, metadata={"help": "What to forecast; all but the date if none."})
    date_column: str = field(default="date", metadata={"help": "Column of dates, at even steps."})
    parts: list[int] = field(default_factory=lambda: [10080, 3600, 3600], metadata={"help": "Rows of each part."})
    horizon: int = field(default=24, metadata={"help": "Rows to forecast."})
    context: int = field(default=512, metadata={"help": "Rows to forecast from."})
    config_overrides: str = field(default="{}", metadata={"help": "JSON: config values of the model."})
    card_name: str = field(default="patchtst", metadata={"help": "Start of the run's name on its card."})

    def __post_init__(self) -> None:
        if min(self.horizon, self.context) < 1:
            raise ValueError(f"horizon and context must be at least 1, got {self.horizon} and {self.context}.")
        other = (self.train_file, self.train_rows, self.test_rows)
        if any(other) or self.train_split != PARTS[0] or self.test_split not in PARTS[1:]:
            raise ValueError("name the series by --dataset, --parts cuts it; --test_split is validation or test.")
        self.max_length = self.context
        super().__post_init__()

    def windows(self, part: str) -> Dataset:
        """The first rows of all windows whose future lies in a part; their past may reach back into the one before."""
        begin, rows = sum(self.parts[: PARTS.index(part)]), self.parts[PARTS.index(part)]
        found = range(max(begin - self.context, 0), begin + rows - self.context - self.horizon + 1)
        if not found:
            raise ValueError(f"{part}: {rows} rows hold no context {self.context} + horizon {self.horizon}; lower one.")
        return Dataset.from_dict({"start": list(found)})


def read_series(data: SeriesArguments) -> torch.Tensor:
    """(T,C), checked, as z-scores by the training part."""
    found = load_rows(data.dataset or "", data.dataset_config, None, data.date_column)
    if len(data.parts) != len(PARTS) or min(data.parts) < 1 or len(found) < sum(data.parts):
        raise ValueError(f"--parts must be rows of {', '.join(PARTS)}, {len(found)} at most in all, got {data.parts}.")
    rows = found.to_dict()
    try:
        dates = np.array(rows.pop(data.date_column), dtype="datetime64[s]")
    except ValueError as problem:
        raise ValueError(f"{data.date_column!r} must hold dates such as 2016-07-01 00:00:00: {problem}.") from None
    usual = np.median(np.abs(steps := np.diff(dates))[~np.isnat(steps)])
    for before, after, step in zip(dates, dates[1:], steps, strict=False):
        if step != usual or step <= np.timedelta64(0):
            raise ValueError(f"{after} follows {before}, not {usual} later; sort rows, fill gaps, drop what repeats.")
    for name in (names := data.columns or list(rows)):
        if name not in rows:
            raise ValueError(f"the series has no column {name!r} of numbers; it has {', '.join(rows)}.")
        for row, value in enumerate(rows[name]):
            with contextlib.suppress(TypeError, ValueError):  # a single word makes a column of text of all its numbers
                if np.isfinite(float(value)):
                    continue
            raise ValueError(f"row {row} of column {name!r}: {value!r} is no finite number; name other --columns.")
    series_TC = np.array([rows[name] for name in names], dtype=np.float64).T
    train_TC = series_TC[: data.parts[0]]
    if (still := np.ptp(train_TC, axis=0) == 0).any():
        raise ValueError(f"column {names[still.argmax()]!r} never changes in the training part; name other --columns.")
    return torch.tensor((series_TC - train_TC.mean(0)) / train_TC.std(0), dtype=torch.float32)


def collate(rows: list[dict[str, int]], series_TC: torch.Tensor, context: int, horizon: int) -> dict[str, torch.Tensor]:
    """Windows from their first rows."""
    whole = torch.stack([series_TC[row["start"] : row["start"] + context + horizon] for row in rows])
    return {"past_values": whole[:, :context], "future_values": whole[:, context:]}


@torch.no_grad()
def predict(trainer: Any, test: Dataset, power: int = 2) -> tuple[list[float], list[float]]:
    """Mean squared error (absolute for power 1) of every held-out window, and zeros."""
    model, losses = trainer.model.eval(), []
    for batch in tqdm(trainer.get_test_dataloader(test), desc="forecast", unit="batch", leave=False):
        missed = model(past_values=batch["past_values"]).prediction_outputs - batch["future_values"]
        losses += trainer.accelerator.gather_for_metrics(missed.abs().pow(power).mean((1, 2))).tolist()
    return losses, [0.0] * len(losses)


def figures(trainer: Any, test: Dataset) -> dict[str, float]:
    """Mean absolute error, and the outliers."""
    with record(trainer.model, modules=OUTPUTS) as recording:
        predict(trainer, test.select(range(0, len(test), -(-len(test) // 128))))
    outliers = {"kurtosis": recording.kurtosis, "max_inf_norm": recording.max_infinity_norm}
    return {"mae": float(np.mean(predict(trainer, test, power=1)[0])), **outliers}


def build_task(model: ModelArguments, data: SeriesArguments) -> Task:
    """Everything is read and checked here, before any training."""
    series_TC = read_series(data)
    sizes = {"context_length": data.context, "prediction_length": data.horizon, "num_input_channels": len(series_TC.T)}
    config = scratch_config(model.model, data.config_overrides, **sizes).to_dict()
    if config["model_type"] != PatchTSTConfig.model_type:
        raise ValueError(f"--model must be {PatchTSTConfig.model_type}, or a model of this kind, not {model.model}.")
    return Task(
        load=lambda: PatchTSTForPrediction(PatchTSTConfig(**config)),
        train=data.windows("train"),
        test=data.windows(data.test_split),
        collate=functools.partial(collate, series_TC=series_TC, context=data.context, horizon=data.horizon),
        metrics=["mse"],
        predict=predict,
        settings={name: value for name, value in vars(data).items() if not name.endswith("_name")},
        scratch=True,
        figures=figures,
    )


def main(argv: list[str] | None = None) -> None:
    classes = (ModelArguments, SeriesArguments, ConversionArguments, TrainingArguments)
    model, data, conversion, training = parse(classes, argv)
    training.remove_unused_columns, training.label_names = False, ["future_values"]  # the collator reads first rows
    use, alike = "Compares attentions on this series; a forecaster of its z-scores.", data.context + data.horizon
    about = About(prefix=data.card_name, intended_use=use, block=alike, **KIND)
    if compare(lambda: build_task(model, data), about, model, data, conversion, training) is not None:
        past, future = (task := build_task(model, data)).collate(list(task.test)).values()
        missed = future - past[:, -1:]
        print(f"repeating the last value: mse {missed.square().mean():.4f}, mae {missed.abs().mean():.4f}")


if __name__ == "__main__":
    main()
