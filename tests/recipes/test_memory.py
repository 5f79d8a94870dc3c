"""The two memory recipes run end to end on images made here, and what they write is what they measured."""

from __future__ import annotations

import gzip
import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from hf_attn_swap.memory import NORMALIZERS
from tests.harness.recipes import RECIPES, needs_recipes

pytestmark = needs_recipes
MEAN = "mean image"
Run = Callable[..., dict[str, Any]]


def pictures(count: int) -> tuple[np.ndarray, np.ndarray]:
    """8 × 8: a bright column per label, and little noise."""
    generator = np.random.default_rng(0)
    labels = np.arange(count, dtype=np.uint8) % 4
    images = generator.integers(0, 20, (count, 8, 8), dtype=np.uint8)
    images[np.arange(count), :, 2 * labels] = 255
    return images, labels


@pytest.fixture
def idx(tmp_path: Path) -> Path:
    folder = tmp_path / "idx"
    folder.mkdir()
    for prefix in ("train", "t10k"):
        for name, array in zip(("images-idx3", "labels-idx1"), pictures(40), strict=True):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (folder / f"{prefix}-{name}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a recipe's `main` with some flags; what it wrote as JSON."""
    monkeypatch.syspath_prepend(str(RECIPES))

    def call(name: str, *flags: str) -> dict[str, Any]:
        out = tmp_path / "out"
        monkeypatch.setattr(sys, "argv", [name, f"--out={out}", *flags])
        importlib.import_module(name).main()
        result = json.loads((out / f"{name}.json").read_text())
        for picture in out.glob("*.png"):
            with Image.open(picture) as image:
                assert min(image.size) > 100
        return {**result, "pictures": sorted(path.name for path in out.glob("*.png"))}

    return call


def memory_flags(folder: Path) -> list[str]:
    sweeps = [
        "--sizes",
        "2",
        "10",
        "--noises",
        "0.0",
        "3.0",
        "--noise_size",
        "10",
        "--more_steps",
        "1",
        "9",
        "--seeds",
        "2",
    ]
    return [f"--dataset={folder}", *sweeps, "--beta=2", "--threshold=1"]


@pytest.mark.slow
def test_memory(idx: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    result = run("memory", *memory_flags(idx))
    assert result["pictures"] == ["memory.png", "recall.png"]
    assert result["options"]["sizes"] == [2, 10]
    rows = {(row["sweep"], row["value"], row["normalizer"]): row for row in result["rows"]}
    asked = [("size", 2.0), ("size", 10.0), ("noise", 0.0), ("noise", 3.0), ("steps", 1.0), ("steps", 9.0)]
    assert list(rows) == [(*each, name) for each in asked for name in (*NORMALIZERS, MEAN)]
    for row in result["rows"]:
        assert len(row["success"]) == len(row["error"]) == 2
    for name in (*NORMALIZERS, MEAN):  # the last two sweeps begin with what the first has measured
        assert rows["size", 10.0, name] | {"sweep": "steps", "value": 1.0} == rows["steps", 1.0, name]
    assert rows["steps", 1.0, "softmax"]["error"] != rows["steps", 9.0, "softmax"]["error"]
    noiseless, noisy = (rows["noise", sigma, "softmax"] for sigma in (0.0, 3.0))
    assert max(noiseless["error"]) < min(noisy["error"])
    assert min(noiseless["nearest"]) > max(noisy["nearest"])
    assert rows["size", 10.0, MEAN]["nearest"] == pytest.approx([0.1, 0.1])
    assert "| size 10 |" in capsys.readouterr().out


@pytest.mark.slow
def test_multiple_instance(idx: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--bags=64", "--bag_sizes", "3", "--epochs=8", "--seeds=2", "--bits=4", "--signals=2", "--digit=3"]
    result = run("multiple_instance", f"--dataset={idx}", *sizes, "--learning_rate=0.02")
    assert result["pictures"] == ["multiple_instance.png"]
    cells = [(row["task"], row["bag_size"], row["normalizer"]) for row in result["rows"]]
    assert cells == [(task, 3, name) for task in ("bits", "mnist") for name in NORMALIZERS]
    for row in result["rows"]:
        assert len(row["accuracy"]) == 2
        assert [len(curve) for curve in row["loss"]] == [8, 8]
        assert all(curve[-1] < curve[0] for curve in row["loss"])
        assert row["mean"] == pytest.approx(sum(row["accuracy"]) / 2)
    easy = [row["mean"] for row in result["rows"] if row["task"] == "mnist" and row["normalizer"] == "outeffhop"]
    assert min(easy) > 0.8  # a bright column at one of four places is no puzzle
    assert "| bits, 3 per bag |" in capsys.readouterr().out


def test_bags_hold_one_signal_or_none(run: Run) -> None:
    recipe = importlib.import_module("multiple_instance")
    generator = torch.Generator().manual_seed(0)
    sets = (torch.ones(3, 2), -torch.ones(5, 2))
    bags, labels = recipe.fill(sets, 6, 4, generator)
    assert bags.shape == (6, 4, 2)
    assert labels.tolist() == [1, 0, 1, 0, 1, 0]
    assert ((bags > 0).all(-1).sum(1) == labels).all()
