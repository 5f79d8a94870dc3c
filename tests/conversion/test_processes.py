"""What several processes decide alike; what splits weights is refused, and the first error is the one that is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

from hf_attn_swap.conversion import distributed
from hf_attn_swap.conversion.config import ConvertConfig
from hf_attn_swap.conversion.distributed import broadcast_from_rank0
from hf_attn_swap.conversion.journal import Journal, fingerprint
from hf_attn_swap.conversion.rows import ready_rows
from hf_attn_swap.conversion.run import Run
from tests.contract.harness import refused

from .converting import converted, rows, same, stock, weights


def arguments(**given: Any) -> Any:
    return SimpleNamespace(**{"world_size": 1, "should_save": True, **given})


@pytest.fixture
def first(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the first process has at each exchange; this process is the second."""
    values: list[Any] = []

    def broadcast(held: list[Any]) -> None:
        held[0] = values.pop(0)

    monkeypatch.setattr(distributed.dist, "broadcast_object_list", broadcast)
    return values


def test_the_first_process_decides(first: list[Any]) -> None:
    first += ["theirs"]
    assert broadcast_from_rank0("mine", arguments()) == "mine"
    assert broadcast_from_rank0("mine", arguments(world_size=2)) == "theirs"
    assert first == []


def test_losses_are_those_of_the_first_process(first: list[Any]) -> None:
    first += ["theirs"]
    held: Any = SimpleNamespace(lost=lambda model, progress: "mine")
    model = stock("bert")
    state: Any = SimpleNamespace(held=held, student=model, progress=False, args=arguments(world_size=2))
    assert Run.lost(state) == "theirs"


def test_results_are_those_of_the_first_process(first: list[Any]) -> None:
    """Such as the layers that a step has chosen, and what it says of them."""
    first += [([[1]], ["theirs"])]
    model: Any = torch.nn.Linear(1, 1)
    run = Run(
        model=model,
        config=ConvertConfig(variant="belief"),
        rows=ready_rows([], dict),
        args=arguments(world_size=2),
        folder=Path(),
        journal=Journal(None, {}),
    )
    assert run.apply("choose", lambda: run.say("mine") or [[0]]) == [[1]]
    assert run.sentences == ["theirs"]


def test_processes_that_see_other_folders(first: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = stock("bert")
    first += [fingerprint(model.parameters()), 1]
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with refused("holds other files for the first process; name a folder that all processes share."):
        converted(model, "belief", rows("bert"), output_dir=tmp_path)


@pytest.mark.parametrize("how", ["fsdp", "zero 3", "split before"])
def test_split_weights_are_refused_before_anything_is_measured(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, args = stock("bert"), TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    before = weights(model)
    if how == "fsdp":
        monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    elif how == "zero 3":
        args.deepspeed_plugin = SimpleNamespace(zero_stage=3)
    else:
        next(iter(model.parameters())).ds_id = 0  # as DeepSpeed marks it
    with refused("work on whole weights", "--multi_gpu"):
        converted(model, "belief", [], args=args)
    assert same(weights(model), before)


def test_processes_with_other_weights(first: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a launcher lets the first process alone load the model."""
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    first += ["other weights"]
    with refused("the processes have other weights than the first; each has to load the whole model"):
        converted(stock("bert"), "belief", rows("bert"))


def test_a_folder_of_another_number_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted(stock("bert"), "belief", rows("bert"), output_dir=tmp_path)
    monkeypatch.setattr(distributed.dist, "broadcast_object_list", lambda held: None)
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    with refused("holds another conversion (processes differ)"):
        converted(stock("bert"), "belief", rows("bert"), output_dir=tmp_path)


def test_the_first_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the way back fails too, as with weights that something else has taken away."""

    def broken(*_: Any) -> None:
        raise RuntimeError("mixed tensors")

    monkeypatch.setattr(Run, "undo", broken)
    monkeypatch.setattr(Run, "lost", lambda self: {}["the first error"])
    with pytest.raises(KeyError, match="the first error") as told:
        converted(stock("bert"), "belief", rows("bert"))
    notes = getattr(told.value, "__notes__", ["could not be made the stock model again (mixed tensors); load it anew."])
    assert notes[0].endswith("could not be made the stock model again (mixed tensors); load it anew.")
