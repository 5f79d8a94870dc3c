"""A PatchTST is trained and converted by the recipe, and its record is what the models give."""

from __future__ import annotations

import importlib
import json
import math
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.harness.recipes import RECIPES, needs_recipes

pytestmark = needs_recipes


def test_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.syspath_prepend(str(RECIPES))
    module = importlib.import_module("convert_series")
    first = datetime(2016, 7, 1)
    lines = [f"{first + timedelta(hours=row)},{math.sin(row / 2)},{math.sin(row / 5) + row % 3}" for row in range(260)]
    series = tmp_path / "series.csv"
    series.write_text("\n".join(["date,high,low", *lines]) + "\n", encoding="utf-8")
    flags = ["--parts", "140", "40", "60", "--horizon", "4", "--every", "2", "--context", "32", "--steps", "4"]
    flags += ["--windows", "48", "--variants", "belief"]
    monkeypatch.setattr(
        sys, "argv", ["convert_series", "--dataset", str(series), "--out", str(tmp_path / "out"), *flags]
    )
    module.main()
    text = (tmp_path / "out" / "convert-series.json").read_text("utf-8")
    result = json.loads(text)
    assert str(tmp_path) not in text
    assert result["test_windows"] == 29
    assert list(result["runs"]) == ["belief"]
    for each in result["runs"].values():
        mean, low, high = each["difference"]
        assert mean == pytest.approx(each["converted"] - result["stock"], rel=1e-5, abs=1e-9)
        assert low <= mean <= high
        assert each["layers"] == 3
        assert each["converted"] != result["stock"]
    printed = capsys.readouterr().out
    assert f"| `belief` | {result['stock']:.4f} | {result['runs']['belief']['patched']:.4f} |" in printed
