"""Trains a PatchTST on a series, and converts it to one attention after another, without labels.

    python recipes/convert_series.py --dataset data/ETTh1.csv --out runs/convert-series

The model, the series and the figures are those of time_series.py with recipes/configs/etth1_small.yaml. `convert` reads
the pasts of training windows alone. The table has the mean squared error of the forecasts of the test windows: of the
trained model, as patched, and converted, with the 95 % interval of the difference (bootstrap over blocks of windows
whose futures overlap), and the relative squared error of the forecasts beside those of the trained model.
"""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml
from memory_figures import start  # these files lie beside this recipe
from time_series import SeriesArguments, build_task, predict
from transformers import HfArgumentParser, PatchTSTForPrediction, Trainer, TrainingArguments, set_seed

from hf_attn_swap import convert, patch_model
from hf_attn_swap.publish.results import versions
from hf_attn_swap.text.table import markdown
from hf_attn_swap.training import ModelArguments
from hf_attn_swap.training.metrics import paired_interval

CONFIG = Path(__file__).parent / "configs" / "etth1_small.yaml"


@dataclass(kw_only=True)
class Options:
    """The series, the training and the conversion."""

    dataset: Path = field(metadata={"help": "File of the series."})
    out: Path = field(default=Path("convert_series"), metadata={"help": "Folder for the record."})
    variants: list[str] = field(default_factory=lambda: ["outeffhop", "belief", "sink"])
    horizon: int = field(default=24, metadata={"help": "Number of rows to forecast."})
    context: int = field(default=336, metadata={"help": "Number of rows to forecast from."})
    parts: list[int] = field(
        default_factory=lambda: [10080, 3600, 3600],
        metadata={"help": "Number of rows for training, validation and test."},
    )
    every: int = field(default=4, metadata={"help": "Every n-th test window is forecast."})
    steps: int = field(default=200, metadata={"help": "Training steps of the PatchTST."})
    windows: int = field(default=2000, metadata={"help": "Windows that a conversion trains on."})
    seed: int = field(default=0)


def measure(options: Options) -> dict[str, Any]:
    """Train, convert and measure: the record."""
    shipped = yaml.safe_load(CONFIG.read_text("utf-8"))
    data = SeriesArguments(
        dataset_name=str(options.dataset),
        parts=options.parts,
        horizon=options.horizon,
        context=options.context,
        config_overrides=shipped["config_overrides"],
    )
    task = build_task(ModelArguments(model_name_or_path="patchtst"), data)
    test = task.test.select(range(0, len(task.test), options.every))
    arguments = TrainingArguments(
        output_dir=str(options.out / "trainer"),
        max_steps=options.steps,
        per_device_train_batch_size=shipped["per_device_train_batch_size"],
        per_device_eval_batch_size=shipped["per_device_eval_batch_size"],
        learning_rate=shipped["learning_rate"],
        warmup_steps=options.steps // 10,
        seed=options.seed,
        save_strategy="no",
        report_to="none",
        remove_unused_columns=False,
        label_names=["future_values"],
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    set_seed(options.seed)
    trained = task.load()
    Trainer(trained, arguments, task.collate, train_dataset=task.train).train()
    trained = trained.cpu().eval()

    def errors(model: PatchTSTForPrediction) -> list[float]:
        return predict(Trainer(model, arguments, task.collate), test)[0]

    pasts = task.train.select(range(0, len(task.train), max(len(task.train) // options.windows, 1)))
    rows = [{"past_values": past} for past in task.collate(list(pasts))["past_values"]]
    stock = errors(trained)
    record: dict[str, Any] = {"stock": sum(stock) / len(stock), "test_windows": len(stock), "runs": {}}
    for variant in options.variants:
        patched = patch_model(copy.deepcopy(trained), variant)
        converted = copy.deepcopy(trained)
        report = convert(converted, variant, rows, tokens=options.windows, progress=False)
        converted_errors = errors(converted)
        as_patched = errors(patched)
        few = len(stock) < 10 * (options.horizon // options.every)
        block = options.horizon // options.every
        record["runs"][variant] = {
            "patched": sum(as_patched) / len(stock),
            "converted": sum(converted_errors) / len(stock),
            "difference": None
            if few
            else paired_interval("mse", [converted_errors], [stock], [0.0] * len(stock), block=block),
            "relative_error_patched": report.steps[0].lost.relative_error,
            "relative_error": report.lost.relative_error,
            "layers": len(report.steps[-1].layers),
        }
    return record


def table(record: dict[str, Any]) -> str:
    """A row per variant; errors of z-scores, relative errors in percent."""
    rows = []
    for variant, figures in record["runs"].items():
        interval = "–"
        if figures["difference"] is not None:
            interval = "{:+.4f} [{:+.4f}, {:+.4f}]".format(*figures["difference"])
        relative = (f"{100 * figures[name]:.2f}" for name in ("relative_error_patched", "relative_error"))
        errors = (f"{figure:.4f}" for figure in (record["stock"], figures["patched"], figures["converted"]))
        rows.append((f"`{variant}`", *errors, interval, *relative))
    header = ("attention", "stock", "as patched", "converted", "difference [95 %]")
    return markdown((*header, "forecast, as patched, %", "converted, %"), rows)


def main() -> None:
    (options,) = HfArgumentParser(Options).parse_args_into_dataclasses()  # type: ignore[arg-type]  # is one
    record = measure(options)
    kept = asdict(options) | {"dataset": options.dataset.name}
    del kept["out"]
    options.out.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"options": kept, **record, "versions": versions()}, indent=1)
    (options.out / "convert-series.json").write_text(content + "\n", encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    start(main)
