"""Two processes, as accelerate and torchrun start them, end with one result; none waits for the other for ever."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from hf_attn_swap.publish.results import RunResult
from tests.harness.process import together
from tests.training.conftest import options, tiny  # noqa: F401  # the tiny model and sentences of the recipes

TIMEOUT = 120  # seconds; a process that waits for the other would wait for ever
STEPS, ROWS = 25, 16  # training steps, and the rows of each process in a step


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 400 texts of four tokens each, and [CLS] and [SEP]."""
    words = ("film", "plot", "cast", "the", "was", "dull", "great")
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    lines = (f"{words[i % 7]} {words[i // 7 % 7]} {words[i // 49 % 7]} {words[3 * i % 7]}" for i in range(400))
    path.write_text("\n".join(lines))
    return path


def both(*words: object) -> tuple[str, str]:
    """What the first process prints, on stdout and stderr. Both have to succeed, and the other prints nothing."""
    first, other = together(2, "-m", "hf_attn_swap_cli", *words, timeout=TIMEOUT)
    assert (first.returncode, other.returncode) == (0, 0), first.stderr[-2000:] + other.stderr[-2000:]
    assert other.stdout == ""
    return first.stdout, first.stderr


def report_of(out: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((out / "conversion.json").read_text())
    return report


@pytest.mark.slow
def test_convert(tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    """The record has the batch and the steps of both processes together, and the user is told."""
    tokens = STEPS * 2 * ROWS * 6
    out, err = both(
        *("convert", tiny_bert, "belief", tmp_path / "out", "--data", texts, "--tokens", tokens, "--device", "cpu")
    )
    assert out.count("2 of 2 layers run belief") == 1
    assert err.count("saving in") == 1
    assert "2 processes: a training step reads" in err
    assert "2 processes trained together, so a training step read 2 x 16 rows." in out
    assert report_of(tmp_path / "out")["steps"][-1]["tokens"] == tokens
    record = RunResult.load(tmp_path / "out" / "results.json")
    assert (record.budget.batch_size, record.budget.steps) == (2 * ROWS, STEPS)
    assert record.hardware.startswith("2 x CPU ")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert model.config.attn_swap["swaps"][0]["retrained"] is True


@pytest.mark.slow
def test_quantize(tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    tokens = STEPS * 2 * ROWS * 6
    out, _ = both("quantize", tiny_bert, tmp_path / "out", "--data", texts, "--tokens", tokens, "--device", "cpu")
    assert "8-bit integers" in out
    trained = [step for step in report_of(tmp_path / "out")["steps"] if step["name"].startswith("distilled in 8 bits")]
    assert [step["tokens"] for step in trained] == [tokens]


@pytest.mark.slow
def test_train(tiny: Path, tmp_path: Path) -> None:  # noqa: F811  # the fixture
    stages = (
        "--stages",
        "calibrate",
        '{"stage": "distil", "epochs": 1, "layers": 1, "logits": 0}',
        '{"stage": "distil", "epochs": 1}',
        "fine_tune",
    )
    words = options(tiny, tmp_path, "--variant", "simpletron_resl", *stages, "--max_steps", str(STEPS))
    out, _ = both("train", "text-classification", *words, "--logging_steps", "10")
    assert out.count("difference to the softmax control") == 1
    record = RunResult.load(tmp_path / "simpletron-resl" / "results.json")
    assert (record.budget.batch_size, record.budget.steps) == (16, STEPS)
