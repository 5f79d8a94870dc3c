"""`hf-attn-swap report` on text, causal and image models, and what it says to bad input."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import AutoTokenizer, BertModel, ViTConfig, ViTForImageClassification

from hf_attn_swap import patch_model
from hf_attn_swap.text.typed import install

Command = Callable[..., Any]


def texts(path: Path, rows: list[str], column: str = "sentence") -> Path:
    with path.open("w", encoding="utf-8", newline="") as lines:
        csv.writer(lines).writerows([[column], *([row] for row in rows)])
    return path


def page(folder: Path) -> tuple[str, dict[str, Any]]:
    return (folder / "report.html").read_text("utf-8"), json.loads((folder / "report.json").read_text("utf-8"))


def words(data: Path, out: Path, *more: str) -> list[str]:
    return ["--data", str(data), "--column", "sentence", "--out", str(out), *more]


def test_a_stock_model_with_a_variant(command: Command, tiny_bert: Path, labelled_texts: Path, tmp_path: Path) -> None:
    done = command(
        "report", tiny_bert, *words(labelled_texts, tmp_path, "--variant", "modern_hopfield", "-o", "alpha=0.25")
    )
    assert done.code == 0, done.err
    html, figures = page(tmp_path)
    assert list(figures["recordings"]) == ["unswapped", "modern_hopfield"]
    assert figures["rows"] == figures["recordings"]["modern_hopfield"]["samples"] == 32
    assert figures["summary"]["modern_hopfield"]["entropy"] != figures["summary"]["unswapped"]["entropy"]
    assert figures["swap"]["rows"][0]["options"] == {
        "modern_hopfield": {**figures["swap"]["rows"][0]["options"]["modern_hopfield"], "alpha": 0.25}
    }
    assert html.count("data:image/png;base64,") == 5
    assert not re.findall(r"(?:src|href)=.(?!data:)", html), "the page must not need anything else"
    assert str(tmp_path / "report.html") in done.out
    for label in ("unswapped", "modern_hopfield"):
        largest = [layer["largest"] for layer in figures["recordings"][label]["layers"]]
        assert len(largest) == 2
        for activation in largest:
            name = AutoTokenizer.from_pretrained(tiny_bert).decode([activation["token"]])
            assert f"{activation['value']:.3g}, token {activation['place']} &#39;{name}&#39;" in html


def test_a_swapped_checkpoint(command: Command, tiny_bert: Path, labelled_texts: Path, tmp_path: Path) -> None:
    model = BertModel.from_pretrained(tiny_bert)
    patch_model(model, "outeffhop", strength=0.5)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path / "model")
    done = command("report", tmp_path / "model", *words(labelled_texts, tmp_path / "out"))
    assert done.code == 0, done.err
    assert "strength 0" in done.err
    figures = page(tmp_path / "out")[1]
    assert [row["strength"] for row in figures["swap"]["rows"]] == [0.5, 0.5]
    refused = command(
        "report", tmp_path / "model", *words(labelled_texts, tmp_path / "out", "--variant", "modern_hopfield")
    )
    assert refused.code == 2
    assert "error: this model is swapped already" in refused.err


def test_the_loss_by_position(command: Command, tiny_llama: Path, texts: Path, tmp_path: Path) -> None:
    sizes = ("--rows", "2", "--length", "100")
    line = " ".join(row.partition(",")[0] for row in texts.read_text().splitlines()[1:])
    data = tmp_path / "lines.csv"
    data.write_text(f"text\n{line}\n{line}\n")
    done = command("report", tiny_llama, "--data", data, *sizes, "--variant", "belief", "--out", tmp_path)
    assert done.code == 0, done.err
    html, figures = page(tmp_path)
    bins = figures["lost"]["by_position"]
    assert [row["first"] for row in bins] == [1, 64]
    assert "<th>tokens before</th><th>unswapped</th><th>swapped</th>" in html
    assert f"<td>64-127</td><td>{bins[1]['stock_loss']:.3f}</td><td>{bins[1]['loss']:.3f}</td>" in html


def test_an_image_model(command: Command, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8)).save_pretrained(tmp_path / "model")
    transformers.ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    try:
        transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")
    except ImportError as problem:
        pytest.skip(f"transformers {transformers.__version__} reads images with torchvision alone: {str(problem)[:60]}")
    (tmp_path / "images" / "test").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for index in range(3):
        Image.fromarray(rng.integers(0, 255, (20, 20, 3), dtype=np.uint8)).save(
            tmp_path / "images" / "test" / f"{index}.png"
        )
    data = (
        "--data",
        tmp_path / "images",
        "--column",
        "image",
        "--out",
        tmp_path / "out",
        "--variant",
        "clipped_softmax",
    )
    done = command("report", tmp_path / "model", *data)
    assert done.code == 0, done.err
    html, figures = page(tmp_path / "out")
    assert list(figures["recordings"]) == ["unswapped", "clipped_softmax"]
    assert html.count("data:image/png;base64,") == 5
    refused = command(
        "report", tmp_path / "model", *words(texts(tmp_path / "t.csv", ["x"]), tmp_path, "--variant", "modern_hopfield")
    )
    assert "takes images" in refused.err


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([], ["--variant", "modern_hopfield"], "cannot be read"),
        (["", "  "], ["--variant", "modern_hopfield"], "is blank"),
        (["a film"], ["--variant", "modern_hopfield", "--column", "text"], "no column 'text'"),
        (["a film"], ["--variant", "no_such"], "no_such"),
        (["a film"], [], "name a variant"),
    ],
)
def test_bad_input_is_one_line(
    command: Command, tiny_bert: Path, tmp_path: Path, rows: list[str], more: list[str], message: str
) -> None:
    done = command("report", tiny_bert, *words(texts(tmp_path / "rows.csv", rows), tmp_path / "out", *more))
    assert done.code == 2
    errors = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("module", "extra"), [("datasets", "train"), ("matplotlib.figure", "report"), ("torchdiffeq", "dynamics")]
)
def test_a_missing_package_names_the_extra(
    module: str, extra: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(**_: Any) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(sys.modules["hf_attn_swap_cli.app"], "app", fails)
    refused = command("report")
    assert refused.code == 2
    assert refused.err == f"error: No module named {module!r}; {install(extra)}\n"
