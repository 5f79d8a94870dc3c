"""The bar of a training without labels: the loss beside it, and no printed lines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PrinterCallback, ProgressCallback

from hf_attn_swap.conversion import trainer as progress
from hf_attn_swap.conversion.trainer import Bar, quiet


def test_the_loss_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    bar, words = Bar("distil 1"), []
    state: Any = SimpleNamespace(is_world_process_zero=True, max_steps=10)
    bar.on_train_begin(None, state, None)
    assert bar.training_bar.desc == "distil 1: "
    monkeypatch.setattr(bar.training_bar, "set_postfix_str", words.append)
    for logs in ({"learning_rate": 1.0}, {"loss": "0.12345"}, {"loss": 2}):
        bar.on_log(None, state, None, logs=logs)
    assert words == ["loss 0.123", "loss 2"]


@pytest.mark.parametrize(("shown", "seen"), [(True, True), (False, True), (True, False)])
def test_one_bar_in_place_of_all_lines(shown: bool, seen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "visible", lambda: seen)
    removed, added = [], []
    trainer: Any = SimpleNamespace(remove_callback=removed.append, add_callback=added.append)
    quiet(trainer, "distil 1", shown=shown)
    assert set(removed) == {PrinterCallback, ProgressCallback}
    assert [each.name for each in added] == (["distil 1"] if shown and seen else [])
