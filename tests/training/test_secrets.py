"""No file of a run holds a token of the Hub: its folder is published."""

from __future__ import annotations

import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_attn_swap.conversion import distill
from hf_attn_swap.conversion.distill import without_secrets
from tests.conversion.converting import converted, rows, stock
from tests.harness.recipes import needs_recipes, recipe

from .conftest import options

SECRET = "hf_of_nobody_else"


def told(folder: Path) -> list[str]:
    """The files that hold the secret."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and _holds(path)]


def _holds(path: Path) -> bool:
    return SECRET.encode() in path.read_bytes()


def test_arguments_without_secrets(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), hub_token=SECRET, learning_rate=0.25, report_to="none")
    result = without_secrets(args)
    hidden = {name for name, value in args.to_dict().items() if value == f"<{name.upper()}>"}
    assert hidden == {field.name for field in fields(args) if getattr(result, field.name) != getattr(args, field.name)}
    assert (result.hub_token, result.learning_rate, args.hub_token) == (None, 0.25, SECRET)


@needs_recipes
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
def test_a_run(tiny: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Neither the model nor the record, nor a checkpoint on the way."""
    stages = (
        "--stages",
        '{"stage": "distil", "layers": 1, "logits": 0}',
        '{"stage": "distil", "rank": 2}',
        "fine_tune",
    )
    saving = ("--save_strategy", "steps", "--save_steps", "1", "--hub_token", SECRET)
    removed: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: removed.append(str(path)))
    words = options(tiny, tmp_path, "--variant", "simpletron_resl", *stages, *saving)
    recipe("text_classification.py", words, monkeypatch)
    assert (tmp_path / "simpletron-resl" / "seed-0" / "model" / "training_args.bin").exists()
    assert any("checkpoint-" in path for path in removed)
    assert told(tmp_path) == []


def test_the_checkpoints_of_a_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill, "SAVE_EVERY", 1)
    args = TrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True, hub_token=SECRET)
    converted(stock("bert"), "simpletron_resl", rows("bert"), output_dir=tmp_path, args=args)
    assert list(tmp_path.rglob("training_args.bin"))
    assert told(tmp_path) == []
