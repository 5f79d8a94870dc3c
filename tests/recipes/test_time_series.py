"""Forecasts of a small made-up series, from its file to the record, and what the recipe refuses."""

from __future__ import annotations

import csv
import importlib
import math
import random
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PatchTSTForPrediction

from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.training import ModelArguments
from tests.harness.recipes import RECIPES, needs_recipes

pytestmark = needs_recipes
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
    result = arguments(module, write(tmp_path / "a.csv", rows)).read()
    raw = torch.tensor([row[1:] for row in rows], dtype=torch.float64)
    wanted = (raw - raw[:120].mean(0)) / raw[:120].std(0, correction=0)
    torch.testing.assert_close(result, wanted.float())
    changed = [[date, *(value * 3 + 1 for value in values)] for date, *values in rows[120:]]
    later = arguments(module, write(tmp_path / "b.csv", rows[:120] + changed)).read()
    assert torch.equal(later[:120], result[:120]), "later rows change nothing before them"
    assert not torch.equal(later[120:], result[120:])


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
        results = [*measured.metrics, *measured.outliers]
        assert [metric.name for metric in results] == ["mse", "mae", "kurtosis", "max_inf_norm"]
        assert all(metric.mean > 0 and not metric.higher_is_better for metric in results)
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
