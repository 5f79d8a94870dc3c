"""What several processes decide alike; what splits weights is refused, and the first error is the one that is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from hf_attn_swap.conversion import engine, processes
from hf_attn_swap.conversion.convert import _journal
from hf_attn_swap.conversion.engine import Part
from hf_attn_swap.conversion.journal import Journal
from hf_attn_swap.conversion.processes import of_the_first, refuse_split_weights
from hf_attn_swap.conversion.state import State
from tests.contract.harness import refused

from .converting import converted, rows, same, stock, weights


def arguments(**given: Any) -> Any:
    return SimpleNamespace(**{"world_size": 1, "fsdp": None, "deepspeed_plugin": None, "should_save": True, **given})


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the first process has at each exchange; this process is the second."""
    values: list[Any] = []

    def broadcast(held: list[Any]) -> None:
        held[0] = values.pop(0)

    monkeypatch.setattr(processes.dist, "broadcast_object_list", broadcast)
    return values


def test_the_first_process_decides(first: list[Any]) -> None:
    first += ["theirs"]
    assert of_the_first("mine", arguments()) == "mine"
    assert of_the_first("mine", arguments(world_size=2)) == "theirs"
    assert first == []


def test_losses_are_those_of_the_first_process(first: list[Any]) -> None:
    first += ["theirs"]
    held: Any = SimpleNamespace(lost=lambda model, progress: "mine")
    model = stock("bert")
    state: Any = SimpleNamespace(held=held, student=model, progress=False, args=arguments(world_size=2))
    assert State.lost(state) == "theirs"


def test_notes_are_those_of_the_first_process(first: list[Any]) -> None:
    """Such as the layers that a step has chosen."""
    first += [{"groups": [[1]]}]
    journal = Journal(None, {})
    state: Any = SimpleNamespace(notes={"groups": [[0]]}, args=arguments(world_size=2), journal=journal)
    assert engine._worked(state, Part("choose", lambda state: None)) is None
    assert state.notes == {"groups": [[1]]}


def test_processes_that_see_other_folders(first: list[Any], tmp_path: Path) -> None:
    first += [1, 0]
    with refused("holds other files for the first process; name a folder that all processes share."):
        _journal(tmp_path, {}, arguments(world_size=2))
    assert _journal(tmp_path, {}, arguments(world_size=2)).entries == []


@pytest.mark.parametrize(
    ("given", "by"),
    [
        ({"fsdp": True}, "FSDP"),
        ({"fsdp": "full_shard"}, "FSDP"),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, "DeepSpeed ZeRO-3"),
    ],
)
def test_what_splits_weights(given: dict[str, Any], by: str) -> None:
    with refused(f"convert works on whole weights, and {by} splits them over processes"):
        refuse_split_weights(arguments(**given))
    refuse_split_weights(arguments(deepspeed_plugin=SimpleNamespace(zero_stage=2)))


def test_a_model_that_is_split_already() -> None:
    model = torch.nn.Linear(2, 2)
    refuse_split_weights(arguments(), model)
    model.weight.ds_id = 0  # type: ignore[assignment]  # as DeepSpeed marks it
    with refused("and FSDP or DeepSpeed ZeRO-3 splits them"):
        refuse_split_weights(arguments(), model)


def test_convert_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    model = stock("bert")
    before = weights(model)
    with refused("convert works on whole weights, and FSDP splits them over processes"):
        converted(model, "belief", [])
    assert same(weights(model), before)


def test_a_folder_of_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(stock("bert"), "belief", rows("bert"), output_dir=tmp_path)
    monkeypatch.setattr(processes.dist, "broadcast_object_list", lambda held: None)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with refused("holds another conversion (processes differ)"):
        converted(stock("bert"), "belief", rows("bert"), output_dir=tmp_path)


def test_the_first_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the way back fails too, as with weights that something else has taken away."""

    def broken(*_: Any) -> None:
        raise RuntimeError("mixed tensors")

    monkeypatch.setattr(State, "undo", broken)
    monkeypatch.setattr(State, "lost", lambda self: {}["the first error"])
    with pytest.raises(KeyError, match="the first error") as told:
        converted(stock("bert"), "belief", rows("bert"))
    notes = getattr(told.value, "__notes__", ["could not be made the stock model again (mixed tensors); load it anew."])
    assert notes[0].endswith("could not be made the stock model again (mixed tensors); load it anew.")
