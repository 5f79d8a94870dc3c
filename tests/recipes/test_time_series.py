"""Forecasts of a small made-up series, from its file to the record, and what the recipe refuses."""

from __future__ import annotations

import csv
import importlib
import math
import os
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import PatchTSTForPrediction, Trainer, TrainingArguments

import hf_attn_swap
from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.training import ModelArguments
from tests.harness.recipes import RECIPES, needs_recipes

pytestmark = needs_recipes
ROOT = Path(hf_attn_swap.__file__).parent.parent
ETT = Path(os.environ.get("HF_ATTN_SWAP_DATA", "")) / "ett" / "ETTh1.csv"
NAMES = ("date", "high", "low", "oil")
SIZES = '{"d_model": 8, "ffn_dim": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "patch_length": 4}'
CUT = dict(parts=[120, 40, 40], horizon=4, context=16)
Table = list[list[Any]]


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        yield importlib.import_module("time_series")


def table(count: int = 210) -> Table:
    """Hourly sines of three periods, a little noise, and a mean that drifts after the training rows."""
    rng, start = random.Random(0), datetime(2016, 7, 1)
    waves = [[math.sin(row / period) + rng.gauss(0, 0.1) + row // 120 for period in (2, 4, 8)] for row in range(count)]
    return [[start + timedelta(hours=row), *values] for row, values in enumerate(waves)]


def write(path: Path, rows: Table, names: tuple[str, ...] = NAMES) -> str:
    with path.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows([names, *rows])
    return str(path)


def arguments(module: Any, path: str, **changes: Any) -> Any:
    return module.SeriesArguments(**{"dataset_name": path, **CUT, "config_overrides": SIZES, **changes})


def trainer_of(task: Any, model: PatchTSTForPrediction, folder: Path) -> Trainer:
    own = TrainingArguments(
        output_dir=str(folder),
        per_device_eval_batch_size=8,
        remove_unused_columns=False,
        label_names=["future_values"],
        use_cpu=True,
        report_to="none",
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    return Trainer(model, own, task.collate)


def test_parts_do_not_leak(module: Any, tmp_path: Path) -> None:
    data = arguments(module, write(tmp_path / "series.csv", table()))
    futures = {}
    for part, begin, end in (("train", 0, 120), ("validation", 120, 160), ("test", 160, 200)):
        starts = data.windows(part)["start"]
        futures[part] = {row for start in starts for row in range(start + 16, start + 20)}
        assert futures[part] == set(range(max(begin, 16), end)), "every row of a part is forecast, and no other"
        assert len(starts) == end - max(begin, 16) - 3
    assert not futures["test"] & set(range(120)), "the training windows end before"
    assert min(data.windows("test")["start"]) == 144, "the past of a test window reaches back"


def test_z_scores_are_of_the_training_rows(module: Any, tmp_path: Path) -> None:
    rows = table()
    found = arguments(module, write(tmp_path / "a.csv", rows)).read()
    raw = torch.tensor([row[1:] for row in rows], dtype=torch.float64)
    wanted = (raw - raw[:120].mean(0)) / raw[:120].std(0, correction=0)
    torch.testing.assert_close(found, wanted.float())
    changed = [[date, *(value * 3 + 1 for value in values)] for date, *values in rows[120:]]
    later = arguments(module, write(tmp_path / "b.csv", rows[:120] + changed)).read()
    assert torch.equal(later[:120], found[:120]), "later rows change nothing before them"
    assert not torch.equal(later[120:], found[120:])


def test_windows_and_columns(module: Any, tmp_path: Path) -> None:
    data = arguments(module, write(tmp_path / "series.csv", table()), columns=["oil", "low"])
    series = data.read()
    assert series.shape == (210, 2)
    everything = arguments(module, data.dataset_name).read()
    assert torch.equal(series, everything[:, [2, 1]])
    task = module.build_task(ModelArguments(model_name_or_path="patchtst"), data)
    batch = task.collate([task.test[0], task.test[36]])
    assert batch["past_values"].shape == (2, 16, 2)
    assert batch["future_values"].shape == (2, 4, 2)
    assert torch.equal(batch["future_values"][1], series[196:200])


def test_errors_are_the_models_loss(module: Any, tmp_path: Path) -> None:
    """Also with the model's own scaling of every window: what it gives is back on the series' scale."""
    data = arguments(module, write(tmp_path / "series.csv", table()))
    task = module.build_task(ModelArguments(model_name_or_path="patchtst"), data)
    torch.manual_seed(0)
    model = task.load().eval()
    assert model.config.scaling == "std"
    batch = task.collate(list(task.test))
    with torch.no_grad():
        outputs = model(**batch)
    trainer = trainer_of(task, model, tmp_path)
    squared, zeros = task.predict(trainer, task.test)
    assert len(squared) == len(zeros) == len(task.test) == 37
    assert sum(squared) / 37 == pytest.approx(outputs.loss.item(), rel=1e-5)
    assert trainer.evaluate(task.test)["eval_loss"] == pytest.approx(outputs.loss.item(), rel=1e-4)
    further = task.figures(trainer, task.test)
    missed = outputs.prediction_outputs - batch["future_values"]
    assert further["mae"] == pytest.approx(missed.abs().mean().item(), rel=1e-5)
    assert further["kurtosis"] > 0 < further["max_inf_norm"]


@pytest.mark.parametrize("rows", [44, 40])
def test_a_variant_beside_its_control(rows: int, module: Any, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "runs"
    words = [
        *(
            "--model_name_or_path",
            "patchtst",
            "--dataset_name",
            write(tmp_path / "series.csv", table()),
            "--variant",
            "outeffhop",
        ),
        *("--parts", "120", "40", str(rows), "--horizon", "4", "--context", "16", "--config_overrides", SIZES),
        *("--output_dir", str(out), "--max_steps", "3", "--per_device_train_batch_size", "8", "--save_strategy", "no"),
        *("--report_to", "none", "--disable_tqdm", "true", "--use_cpu", "true", "--dataloader_pin_memory", "false"),
    ]
    module.main(words)
    result = RunResult.load(out / "outeffhop" / "results.json")
    assert result.control is not None
    few = [limit for limit in result.limits if limit.startswith("No interval: ")]
    if rows == 40:  # 37 windows are 9 blocks of 4
        assert result.difference is None
        assert len(few) == 1
        return
    assert result.difference is not None
    assert "10 blocks of 4" in result.difference.of
    assert not few
    for measured in (result.converted, result.control):
        assert measured.outliers is not None
        found = [*measured.metrics, *measured.outliers]
        assert [metric.name for metric in found] == ["mse", "mae", "kurtosis", "max_inf_norm"]
        assert all(metric.mean > 0 and not metric.higher_is_better for metric in found)
    assert result.difference.mean == pytest.approx(result.converted.metrics[0].mean - result.control.metrics[0].mean)
    assert result.base.relation == "scratch"
    assert (result.data.rows, result.budget.steps) == ({"train": 101, "test": 41}, 3)
    model = PatchTSTForPrediction.from_pretrained(out / "outeffhop" / "seed-0" / "model")
    task = module.build_task(
        ModelArguments(model_name_or_path="patchtst"), arguments(module, words[3], parts=[120, 40, rows])
    )
    with torch.no_grad():
        loss = model.eval()(**task.collate(list(task.test))).loss.item()
    assert result.converted.metrics[0].mean == pytest.approx(loss, rel=1e-4)
    assert "repeating the last value: mse" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"holds a run with horizon = 4, not 5"):
        module.main([*words, "--horizon", "5"])


def changed(row: int, place: int, value: Any) -> Table:
    rows = table()
    rows[row][place] = value
    return rows


BAD_ROWS = {
    "gap": (table()[:50] + table()[51:], r"2016-07-03T03:00:00 follows 2016-07-03T01:00:00, not 3600.* seconds later"),
    "twice": (table()[:50] + table()[49:], r"2016-07-03T01:00:00 follows 2016-07-03T01:00:00, .* drop what repeats"),
    "order": (table()[::-1], r"follows .*, not .* sort rows"),
    "swapped": ([*table()[:50], table()[51], table()[50], *table()[52:]], "2016-07-03T03:00:00 follows"),
    "no date": (changed(7, 0, "soon"), "'date' must hold dates such as .*soon"),
    "date missing": (changed(7, 0, ""), "NaT follows 2016-07-01T06:00:00"),
    "missing": (changed(30, 3, ""), "row 30 of column 'oil': None is no finite number"),
    "infinite": (changed(31, 2, "inf"), "row 31 of column 'low': inf is no finite number"),
    "text": (changed(32, 1, "high"), "row 32 of column 'high': 'high' is no finite number; name other --columns"),
    "still": ([[date, 1.0, *rest] for date, _, *rest in table()], "column 'high' never changes in the training part"),
    "short": (table(199), r"--parts are rows of train, validation, test, 199 in all at most"),
}


@pytest.mark.parametrize("kind", BAD_ROWS)
def test_bad_rows(kind: str, module: Any, tmp_path: Path) -> None:
    rows, message = BAD_ROWS[kind]
    with pytest.raises(ValueError, match=message) as caught:
        arguments(module, write(tmp_path / "series.csv", rows)).read()
    assert "\n" not in str(caught.value)


BAD_ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "column": (dict(columns=["oil", "gas"]), "no column 'gas' of numbers; it has high, low, oil"),
    "date column": (dict(date_column="day"), "no column 'day'"),
    "file": (dict(dataset_name="./no.csv"), "there is no file"),
    "horizon": (dict(horizon=0), "horizon and context must be at least 1, got 0 and 16"),
    "context": (dict(context=0), "horizon and context must be at least 1, got 4 and 0"),
    "train": (dict(parts=[19, 40, 40]), r"train: 19 rows hold no context 16 \+ horizon 4"),
    "test": (dict(parts=[120, 40, 3]), r"test: 3 rows hold no context 16 \+ horizon 4"),
    "validation": (dict(parts=[120, 3, 40], test_split_name="validation"), "validation: 3 rows hold no"),
    "parts": (dict(parts=[120, 40]), "--parts are rows of train, validation, test"),
    "empty part": (dict(parts=[0, 40, 40]), r"--parts are rows of .*, got \[0, 40, 40\]"),
    "split": (dict(test_split_name="train"), "--test_split_name is validation or test"),
    "rows": (dict(max_train_samples=50), "--parts cuts it"),
    "metric": (dict(metrics=["mae"]), "--metrics has no place here"),
    "horizon twice": (
        dict(config_overrides='{"prediction_length": 1}'),
        "'prediction_length' follows from the data; it is 4",
    ),
    "files": (
        dict(dataset_name=None, train_file="a.csv", test_file="b.csv"),
        "--train_file has no place here: --dataset_name names",
    ),
    "sizes": (dict(config_overrides='{"width": 3}'), "PatchTSTConfig has no 'width'"),
}


@pytest.mark.parametrize("kind", BAD_ARGUMENTS)
def test_bad_arguments(kind: str, module: Any, tmp_path: Path) -> None:
    changes, message = BAD_ARGUMENTS[kind]
    path = write(tmp_path / "series.csv", table())
    with pytest.raises(ValueError, match=message) as caught:
        module.build_task(ModelArguments(model_name_or_path="patchtst"), arguments(module, path, **changes))
    assert "\n" not in str(caught.value)


def test_another_architecture_is_refused(module: Any, tmp_path: Path) -> None:
    data = arguments(module, write(tmp_path / "series.csv", table()), config_overrides="{}")
    with pytest.raises(ValueError, match="--model_name_or_path must be patchtst"):
        module.build_task(ModelArguments(model_name_or_path="bert"), data)


@pytest.mark.parametrize("name", ["etth1", "etth1_small"])
def test_shipped_configs_on_etth1(name: str, module: Any) -> None:
    if not ETT.exists():
        pytest.skip("HF_ATTN_SWAP_DATA names no folder with ett/ETTh1.csv")
    config = yaml.safe_load((RECIPES / "configs" / f"{name}.yaml").read_text("utf-8"))
    own = {key: config[key] for key in ("horizon", "context", "config_overrides")}
    data = module.SeriesArguments(dataset_name=str(ETT), **own)
    task = module.build_task(ModelArguments(model_name_or_path="patchtst"), data)
    assert (len(task.train), len(task.test)) == (10080 - 336 - 24 + 1, 3600 - 24 + 1)
    batch = task.collate([task.train[0], task.test[3576]])
    assert batch["past_values"].shape == (2, 336, 7)
    assert task.load()(**batch).prediction_outputs.shape == (2, 24, 7)
