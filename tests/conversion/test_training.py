"""What one training reads: rows of the budget in their order, or the epochs of a stage; and where it goes on."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainingArguments

from hf_attn_swap.conversion.config import Distil
from hf_attn_swap.conversion.distill import last_whole_checkpoint, next_rows, training_arguments
from hf_attn_swap.conversion.rows import Rows
from hf_attn_swap.conversion.run import Budget
from hf_attn_swap.training.stages import epochs_of
from tests.contract.harness import refused

DISTIL = Distil(batch=2)


def rows_of(length: int, count: int = 10) -> Rows:
    return Rows(rows=[{"input_ids": [number] * length} for number in range(count)], collate=dict, length=length)


def state(length: int, folder: Path, **budget: int) -> Any:
    return SimpleNamespace(
        rows=rows_of(length),
        budget=Budget(**budget),
        config=SimpleNamespace(distil=DISTIL, low_memory=False),
        args=TrainingArguments(output_dir=str(folder), per_device_train_batch_size=5, report_to="none"),
        journal=SimpleNamespace(folder=None),
        folder=folder,
        progress=False,
    )


@pytest.mark.parametrize(("tokens", "left", "count"), [(100, 12, 4), (7, 100, 2), (1, 100, 1)])
def test_a_share_of_the_budget_goes_on_in_the_order(tokens: int, left: int, count: int, tmp_path: Path) -> None:
    found = state(3, tmp_path, left=left, read=3)
    args = training_arguments(found, DISTIL, "distil 1.2")
    order = list(itertools.islice(found.rows.order(2), 3, 3 + count))
    assert [row["input_ids"][0] for row in next_rows(found, DISTIL, tokens)] == order
    assert (args.train_batch_size, args.num_train_epochs) == (2, 1)
    assert Path(str(args.output_dir)) == tmp_path / "distil-1.2"


def test_epochs_of_a_stage(tmp_path: Path) -> None:
    found = state(3, tmp_path)
    rows, args, words = epochs_of(found, Distil(epochs=2.5, learning_rate=0.5), "stage-1")
    assert (len(rows), args.num_train_epochs, args.learning_rate) == (10, 2.5, 0.5)
    assert (args.train_batch_size, words) == (5, "2.5 epochs on 10 training rows")
    assert Path(str(args.output_dir)) == tmp_path / "stage-1"
    assert epochs_of(found, DISTIL, "x")[1].train_batch_size == 2


@pytest.mark.parametrize(("tokens", "rows", "epochs"), [(1, 1, 1.0), (12, 4, 1.0), (30, 10, 1.0), (75, 10, 2.5)])
def test_tokens_of_a_stage(tokens: int, rows: int, epochs: float, tmp_path: Path) -> None:
    read, args, words = epochs_of(state(3, tmp_path), Distil(tokens=tokens), "x")
    assert (len(read), args.num_train_epochs, words) == (rows, epochs, f"{tokens:,} tokens")
    assert [row["input_ids"][0] for row in read] == list(range(rows))


def test_tokens_of_rows_that_have_none(tmp_path: Path) -> None:
    with refused("distil: tokens counts tokens of text; give epochs for other data."):
        epochs_of(state(0, tmp_path), Distil(tokens=10), "x")


def test_the_last_whole_checkpoint(tmp_path: Path) -> None:
    """The newest by its number; those that a killed run left half written go."""
    assert last_whole_checkpoint(tmp_path) is None
    for number, content in ((9, "{}"), (10, json.dumps({"global_step": 10})), (100, '{"glob'), (20, None)):
        (tmp_path / f"checkpoint-{number}").mkdir()
        if content is not None:
            (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text(content)
    assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-10", "checkpoint-9"]


def test_an_incomplete_checkpoint_that_another_process_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All processes look for the last checkpoint at the same time."""
    (tmp_path / "checkpoint-100").mkdir()
    real = shutil.rmtree

    def removed_before(path: Path, **how: bool) -> None:
        real(path)
        real(path, **how)

    monkeypatch.setattr(shutil, "rmtree", removed_before)
    assert last_whole_checkpoint(tmp_path) is None
    assert not list(tmp_path.iterdir())
