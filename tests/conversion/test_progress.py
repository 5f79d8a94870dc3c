"""The bar of a training without labels: the loss and the speed beside it, and no printed lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PrinterCallback, ProgressCallback

from hf_attn_swap.conversion import trainer as progress
from hf_attn_swap.conversion.trainer import Bar, quiet


def begun(monkeypatch: pytest.MonkeyPatch, seen: int) -> tuple[Bar, Any]:
    """A bar at the start of a training that has read some tokens before, and the words beside it."""
    monkeypatch.setattr(progress.time, "perf_counter", iter((100.0, 104.0)).__next__)
    bar, words = Bar("distil 1"), []
    state: Any = SimpleNamespace(is_world_process_zero=True, max_steps=10, num_input_tokens_seen=seen)
    bar.on_train_begin(None, state, None)
    monkeypatch.setattr(bar.training_bar, "set_postfix_str", words.append)
    state.num_input_tokens_seen = seen + 4_800 if seen else 0
    return bar, SimpleNamespace(state=state, words=words)


def test_loss_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed counts only the tokens of this training."""
    bar, own = begun(monkeypatch, 1_000)
    assert bar.training_bar.desc == "distil 1: "
    bar.on_log(None, own.state, None, logs={"learning_rate": 1.0})
    assert own.words == []
    bar.on_log(None, own.state, None, logs={"loss": "0.12345"})
    assert own.words == ["loss 0.123, 1,200 tokens/s"]


def test_rows_that_are_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, own = begun(monkeypatch, 0)
    bar.on_log(None, own.state, None, logs={"loss": 2})
    assert own.words == ["loss 2"]


@pytest.mark.parametrize(("shown", "seen"), [(True, True), (False, True), (True, False)])
def test_one_bar_in_place_of_all_lines(shown: bool, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "visible", lambda: seen)
    removed, added = [], []
    trainer: Any = SimpleNamespace(remove_callback=removed.append, add_callback=added.append)
    quiet(trainer, "align 1", shown=shown)
    assert set(removed) == {PrinterCallback, ProgressCallback}
    assert [each.name for each in added] == (["align 1"] if shown and seen else [])
