"""The recipe of STanHop-Net from a file to its record: what it writes is what the models give."""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import ttest_rel

from hf_attn_swap.memory import STanHopForPrediction
from tests.harness.recipes import RECIPES, needs_recipes

pytestmark = needs_recipes
FLAGS = [
    "--parts",
    "120",
    "40",
    "60",
    "--horizon",
    "4",
    "--every",
    "2",
    "--context",
    "16",
    "--patch",
    "4",
    "--merge",
    "2",
]
FLAGS += ["--width", "8", "--steps", "4", "--batch", "4"]


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RECIPES))
        yield importlib.import_module("stanhop")


@pytest.fixture
def series(tmp_path: Path) -> Path:
    """Hourly sines of two periods."""
    first = datetime(2016, 7, 1)
    lines = [f"{first + timedelta(hours=row)},{math.sin(row / 2)},{math.sin(row / 5) + row % 3}" for row in range(220)]
    path = tmp_path / "series.csv"
    path.write_text("\n".join(["date,high,low", *lines]) + "\n", encoding="utf-8")
    return path


def run(module: Any, series: Path, out: Path, *flags: str) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["stanhop", "--dataset", str(series), "--out", str(out), *FLAGS, *flags])
        module.main()
    result: dict[str, Any] = json.loads((out / "stanhop.json").read_text("utf-8"))
    return result


@pytest.mark.slow
def test_end_to_end(module: Any, series: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    out, names = tmp_path / "out", ["softmax", "generalized_sparse"]
    result = run(module, series, out, "--seeds", "1", "--retrievals", *names)
    assert result["compared"]["generalized_sparse"]["kurtosis"]["difference"] is None, "one seed has no interval"
    result = run(module, series, out, "--seeds", "2", "--retrievals", *names)
    assert set(result["runs"]) == {f"{name}/{seed}" for name in names for seed in (0, 1)}
    assert result["options"]["data"] == "series.csv"
    assert str(tmp_path) not in (out / "stanhop.json").read_text("utf-8")
    assert result["test_windows"] == 29
    for key, each in result["runs"].items():
        table = np.load(out / f"{key.replace('/', '-')}.npy")
        assert table.shape == (3, 29)
        assert [each[name] for name in ("mse", "mae", "w8a8")] == pytest.approx(table.mean(1).tolist(), rel=1e-5)
        assert len(each["losses"]) == 4
        assert ("alphas" in each) == key.startswith("generalized")
    for name, figures in result["compared"].items():
        for figure, each in figures.items():
            pairs = [[result["runs"][f"{one}/{seed}"][figure] for seed in (0, 1)] for one in (name, "softmax")]
            mean, low, high = each["difference"]
            assert mean == pytest.approx(np.subtract(*pairs).mean(), rel=1e-4, abs=1e-7)
            assert low <= mean <= high
            assert each["agree"] == (len(set(np.sign(np.subtract(*pairs)))) == 1)
            if figure in ("kurtosis", "max_inf_norm"):
                wanted = ttest_rel(*pairs).confidence_interval(0.95)
                assert (low, high) == pytest.approx((wanted.low, wanted.high))
    assert (out / "stanhop.png").stat().st_size > 1000
    assert "last value: mse" in capsys.readouterr().out
    # what ended is not run again, and other options need another folder
    monkeypatch.setattr(module, "run", lambda *_: pytest.fail("this run is in the record"))
    assert run(module, series, out, "--seeds", "2", "--retrievals", *names)["runs"] == result["runs"]
    with pytest.raises(SystemExit, match="made with another width"):
        run(module, series, out, "--seeds", "2", "--retrievals", *names, "--width", "16")


def test_the_figures_are_the_models(module: Any, series: Path, tmp_path: Path) -> None:
    """A model trained anew from the seed has the errors of the record; the first windows are cut by hand."""
    options = module.Options(
        dataset=series, out=tmp_path, parts=[120, 40, 60], horizon=4, context=16, every=2, patch=4, width=8, steps=3
    )
    data = module.read(options)
    model, losses = module.train("outeffhop", 1, data)
    assert isinstance(model, STanHopForPrediction)
    assert not model.training
    assert len(losses) == 3
    squared, absolute = module.errors(model, data)
    rows = data.series[144:164]
    with torch.no_grad():
        missed = model(rows[None, :16]).prediction_outputs[0] - rows[16:]
    assert squared[0] == pytest.approx(missed.square().mean().item(), rel=1e-5)
    assert absolute[0] == pytest.approx(missed.abs().mean().item(), rel=1e-5)
    assert module.run("outeffhop", 1, data)[0]["mse"] == pytest.approx(float(squared.mean()), rel=1e-6)
