"""The recipes behind the published figures of outliers, rank collapse and simulations, on small inputs."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, ViTImageProcessorPil

from hf_attn_swap.analysis import record
from tests import zoo
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


def test_rank_collapse_by_the_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a skip tokens become one within a few layers, with it they do not; the first layer is the same."""
    monkeypatch.syspath_prepend(str(RECIPES))
    study = runpy.run_path(str(RECIPES / "rank_collapse.py"))
    images = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    rows = study["measure"](images, 2)
    last = {(row["alpha"], row["alpha_prime"]): row for row in rows if row["layer"] == 12}
    assert len(rows) == 4 * 12
    assert max(last[0.0, 0.0]["high"], last[0.0, 0.5]["high"]) < 1e-6
    assert min(last[0.5, 0.0]["low"], last[0.5, 0.5]["low"]) > 0.3
    assert study["table"](rows).count("\n") == 13
    told = [row for row in rows if row["alpha"] == 0 and row["condition"] == 1 and row["low"] > study["ROUNDING"]]
    assert len(told) > 3
    assert all(row["decay"] <= row["allowed"] for row in told)
    assert study["theorem_table"](rows).count("–") == 24 - sum(
        row["low"] > study["ROUNDING"] for row in rows if row["alpha"] == 0
    )


@pytest.mark.parametrize("name", ["llama", "vit"])
def test_pairs_of_a_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """A model of texts and one of images, stock and under two variants; the figures are those of `record`."""
    model = zoo.build(name)
    model.save_pretrained(tmp_path / "model")
    given = zoo.inputs(name, batch=2)
    if name == "llama":
        rows = Dataset.from_dict({"text": given["input_ids"].tolist()})
    else:
        ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "model")
        try:
            AutoImageProcessor.from_pretrained(tmp_path / "model")
        except ImportError as problem:
            pytest.skip(f"this transformers reads images with torchvision alone: {str(problem)[:60]}")
        rows = Dataset.from_dict({"text": [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]})
    rows.to_parquet(tmp_path / "test.parquet")
    words = ["--model", str(tmp_path / "model"), "--data", str(tmp_path / "test.parquet"), "--rows", "2"]
    words += ["--variants", "modern_hopfield", "simpletron_resl", "--draw", str(tmp_path / "pairs.png")]
    recipe("rank_collapse.py", [*words, "--out", str(tmp_path / "pairs.json")], monkeypatch)
    layers = json.loads((tmp_path / "pairs.json").read_text())["layers"]
    assert list(layers) == ["stock", "modern_hopfield", "simpletron_resl"]
    assert layers["stock"][-1] != layers["modern_hopfield"][-1]
    assert all(layer["entropy"] is None for layer in layers["simpletron_resl"]), "linear attention has none"
    if name == "llama":
        with record(model) as recording, torch.no_grad():
            for row in given["input_ids"]:
                model(row[None])
        for layer, figures in zip(recording.in_order, layers["stock"], strict=True):
            assert figures["cosine"] == pytest.approx(np.mean(layer.similarity), abs=1e-5)
            assert figures["near_one"] == pytest.approx(float(layer.pairs.counts[-5:].sum() / layer.pairs.counts.sum()))
    assert "| layer | stock | modern_hopfield | simpletron_resl |" in capsys.readouterr().out
    assert (tmp_path / "pairs.png").stat().st_size > 10_000
