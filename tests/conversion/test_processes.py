"""What several processes decide alike; what splits weights is refused, and the first error is the one that is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from hf_attn_swap.conversion import distributed
from hf_attn_swap.conversion.config import ConvertConfig
from hf_attn_swap.conversion.convert import _journal
from hf_attn_swap.conversion.distributed import MustBeSplit, broadcast_from_rank0, how_to_split
from hf_attn_swap.conversion.journal import Journal
from hf_attn_swap.conversion.rows import ready_rows
from hf_attn_swap.conversion.run import Run
from tests.contract.harness import refused

from .converting import converted, rows, same, stock, weights


def arguments(**given: Any) -> Any:
    usual = {
        "world_size": 1,
        "fsdp": None,
        "deepspeed_plugin": None,
        "should_save": True,
        "parallel_mode": ParallelMode.DISTRIBUTED,
        "bf16": False,
        "fp16": False,
    }
    return SimpleNamespace(**{**usual, **given})


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
    state: Any = SimpleNamespace(
        held=held, student=model, split_copy=None, progress=False, args=arguments(world_size=2)
    )
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


def test_processes_that_see_other_folders(first: list[Any], tmp_path: Path) -> None:
    first += [1, 0]
    with refused("holds other files for the first process; name a folder that all processes share."):
        _journal(tmp_path, {}, arguments(world_size=2))
    assert _journal(tmp_path, {}, arguments(world_size=2)).entries == []


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what accelerate launch sets for FSDP."""

    def variables(**more: str) -> None:
        for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **more}.items():
            monkeypatch.setenv(name, value)

    return variables


def test_no_split() -> None:
    assert how_to_split(arguments()) is None
    assert how_to_split(arguments(deepspeed_plugin=SimpleNamespace(zero_stage=2)), torch.nn.Linear(2, 2)) is None


def test_fsdp_2(launched: Callable[..., None]) -> None:
    launched()
    plugin = how_to_split(arguments(), stock("bert"))
    assert plugin is not None
    assert plugin.fsdp_version == 2


def test_fsdp_2_of_the_arguments() -> None:
    given = arguments(fsdp=True, fsdp_plugin_args={"fsdp_version": 2, "reshard_after_forward": False})
    plugin = how_to_split(given, stock("bert"))
    assert plugin is not None
    assert plugin.reshard_after_forward is False


def test_what_splits_whole_weights(launched: Callable[..., None]) -> None:
    with refused("and DeepSpeed ZeRO-3 splits them over processes; start it with accelerate launch --use_fsdp"):
        how_to_split(arguments(deepspeed_plugin=SimpleNamespace(zero_stage=3)))
    launched(FSDP_VERSION="1")
    with refused("convert works on whole weights, and version 1 of FSDP splits them over processes"):
        how_to_split(arguments())


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("FSDP_OFFLOAD_PARAMS", "offload_params"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "activation_checkpointing"),
        ("FSDP_IGNORED_MODULES", "ignored_modules"),
    ],
)
def test_a_setting_of_fsdp_that_is_not_followed(variable: str, name: str, launched: Callable[..., None]) -> None:
    launched(**{variable: "true"})
    with refused(f"convert cannot follow FSDP's setting {name}"):
        how_to_split(arguments())


def test_fsdp_in_one_process(launched: Callable[..., None]) -> None:
    launched()
    with refused("and this is one; start it with accelerate launch"):
        how_to_split(arguments(parallel_mode=ParallelMode.NOT_DISTRIBUTED))


def test_half_precision(launched: Callable[..., None]) -> None:
    """What trains has two precisions then, adapters and the variant's own, which FSDP2 does not take together."""
    launched()
    model = stock("bert").to(torch.bfloat16)
    with refused("load the model in float32 (--dtype float32), or train with bf16=True"):
        how_to_split(arguments(), model)
    assert how_to_split(arguments(bf16=True), model) is not None


def test_blocks_that_share_a_weight(launched: Callable[..., None]) -> None:
    launched()
    model = stock("llama")
    first, second = (layer.mlp.up_proj for layer in model.model.layers[:2])
    second.weight = first.weight
    with refused("layers.1.mlp.up_proj.weight is a weight of another block as well"):
        how_to_split(arguments(), model)
    how_to_split(arguments(), stock("albert"))  # one block that runs several times


def test_a_model_that_is_split_already() -> None:
    model = torch.nn.Linear(2, 2)
    model.weight.ds_id = 0  # type: ignore[assignment]  # as DeepSpeed marks it
    with refused("FSDP or DeepSpeed ZeRO-3 has split those of this model already"):
        how_to_split(arguments(), model)


def test_convert_is_refused_before_anything_is_measured(launched: Callable[..., None]) -> None:
    launched(FSDP_VERSION="1")
    model = stock("bert")
    before = weights(model)
    with refused("convert works on whole weights, and version 1 of FSDP splits them over processes"):
        converted(model, "belief", [])
    assert same(weights(model), before)


def test_a_training_that_is_not_split() -> None:
    """Where accelerate does not do what was asked, each process would train by itself, or all by DDP."""
    with pytest.raises(RuntimeError, match="FSDP2 did not split weight"):
        MustBeSplit().on_train_begin(None, None, None, model=torch.nn.Linear(2, 2))


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
