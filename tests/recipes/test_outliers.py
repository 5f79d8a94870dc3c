"""The recipes behind the published figures of outliers, rank collapse and simulations, on small inputs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.harness.recipes import NO_SAVING, RECIPES, needs_recipes, recipe
from tests.training.conftest import options, tiny  # noqa: F401  # the same tiny model and sentences

pytestmark = needs_recipes


def test_outliers_of_two_runs(tiny: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:  # noqa: F811
    for variant in ("softmax", "outeffhop"):
        words = ("--variant", variant, "--num_train_epochs", "0", *NO_SAVING)
        recipe("text_classification.py", options(tiny, tmp_path, *words), monkeypatch)
    trained = load_file(tmp_path / "outeffhop" / "seed-0" / "model" / "model.safetensors")
    stock = load_file(tiny / "model" / "model.safetensors")
    assert all(torch.equal(trained[f"bert.{name}"], value) for name, value in stock.items()), "nothing was trained"
    figures = tmp_path / "figures" / "outliers.json"
    own = ("--runs", "softmax", "outeffhop", "--record_rows", "8", "--range_rows", "16", "--integer", "false")
    arguments = ["text_classification", *options(tiny, tmp_path, *own, "--figures", str(figures))]
    recipe("outliers.py", arguments, monkeypatch)
    result = json.loads(figures.read_text("utf-8"))
    assert list(result["runs"]) == ["softmax", "outeffhop"]
    plain, swapped = result["runs"].values()
    assert plain["entropy"] > swapped["entropy"] > 0, "softmax_1 takes weight away"
    assert plain["fake_cost"][0] == pytest.approx(plain["fake_w8a8"] - plain["accuracy"])
    assert len(plain["similarity"]) == len(plain["entropy_by_layer"]) == 2
    with pytest.raises(SystemExit, match="there is no model in"):
        recipe("outliers.py", [*arguments, "--runs", "modern_hopfield"], monkeypatch)


def test_rank_collapse_by_the_skip() -> None:
    """Without a skip tokens become one within a few layers, with it they do not; the first layer is the same."""
    study = runpy.run_path(str(RECIPES / "rank_collapse.py"))
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    rows = study["measure"](images, 2)
    last = {(row["alpha"], row["alpha_prime"]): row for row in rows if row["layer"] == 12}
    assert len(rows) == 4 * 12
    assert max(last[0.0, 0.0]["high"], last[0.0, 0.5]["high"]) < 1e-6
    assert min(last[0.5, 0.0]["low"], last[0.5, 0.5]["low"]) > 0.3
    assert study["table"](rows).count("\n") == 13
