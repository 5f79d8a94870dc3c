"""A schedule sets the same strengths in a resumed training, and its strengths cause few recompilations."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import Trainer, TrainerCallback, TrainingArguments

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import StrengthSchedule, calibrate, merge_calibration
from tests.contract.harness import batch_of, fresh, refused, swaps
from tests.harness.process import python


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ({"share": 0.0}, [1.0] * 8),
        ({"share": 1.0}, [step / 8 for step in range(1, 9)]),
        ({"start": 0.8, "end": 0.4, "share": 0.25}, [0.6, *[0.4] * 7]),
        ({"share": 1.0, "shape": "cosine"}, [(1 - math.cos(math.pi * step / 8)) / 2 for step in range(1, 9)]),
    ],
)
def test_strength_by_step(arguments: dict[str, Any], wanted: list[float]) -> None:
    schedule = StrengthSchedule(**arguments)
    assert [schedule.strength(step, 8) for step in range(1, 9)] == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"share": 1.5}, "share is a part of the steps"),
        ({"shape": "step"}, "shape must be one of linear, cosine"),
        ({"order": "sideways"}, "order must be one of together, up, down"),
        ({"start": -1}, "strength must be a number from 0"),
        ({"end": 2}, "strength must be a number from 0"),
    ],
)
def test_refused(arguments: dict[str, Any], reason: str) -> None:
    with refused(reason):
        StrengthSchedule(**arguments)


@pytest.mark.parametrize("order", ["up", "down"])
def test_one_layer_after_another(order: str) -> None:
    """Each layer moves in its own part of the steps, and only after the layer before it has arrived."""
    model = patch_model(fresh("llama", torch.float32), "simpletron_resl", strength=0.0)
    count, schedule = len(swaps(model)), StrengthSchedule(share=0.5, order=order)
    steps = 8 * count
    found = []
    for step in range(steps):
        schedule.on_step_begin(None, SimpleNamespace(global_step=step, max_steps=steps), None, model=model)
        found.append([swap.strength for swap in swaps(model)][:: 1 if order == "up" else -1])
    assert count > 1
    assert found[0] == [0.25, *[0.0] * (count - 1)]
    for step, strengths in enumerate(found, 1):
        moved = min(4 * count, step) / 4  # layers' worth of strength
        assert strengths == pytest.approx([min(max(moved - place, 0.0), 1.0) for place in range(count)])
    assert found[-1] == [1.0] * count


@pytest.mark.parametrize("order", ["together", "up", "down"])
def test_a_merged_model_stays_at_full_strength(order: str) -> None:
    """A merge is exact at strength 1 alone, in every order of the layers."""
    model = patch_model(fresh("bert", torch.float32), "softmax")
    calibrate(model, [batch_of("bert", torch.float32)], progress=False)
    merge_calibration(model)
    schedule, state = StrengthSchedule(order=order), SimpleNamespace(global_step=0, max_steps=8)
    with refused("cannot be set to a strength below 1", "merged"):
        schedule.on_step_begin(None, state, None, model=model)
    assert {swap.strength for swap in swaps(model)} == {1.0}


class Seen(TrainerCallback):
    """The strength of every layer while a step runs."""

    def __init__(self) -> None:
        self.strengths: dict[int, set[float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.strengths[state.global_step] = {float(swap.strength_value) for swap in swaps(kwargs["model"])}


def trained(folder: Path, resume: str | None, **arguments: Any) -> dict[int, set[float]]:
    row = {key: value[0] for key, value in batch_of("bert", torch.float32).items()}
    data = [{**row, "labels": row["input_ids"]}] * 12
    seen = Seen()
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        num_train_epochs=1,
        save_strategy="steps",
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **arguments,
    )
    model = patch_model(fresh("bert", torch.float32), "simpletron_resl", strength=0.0)
    trainer = Trainer(model, args, train_dataset=data, callbacks=[StrengthSchedule(share=0.8), seen])
    trainer.train(resume_from_checkpoint=resume)
    return seen.strengths


def test_resumed(tmp_path: Path) -> None:
    whole = trained(tmp_path, None)
    assert {step: strengths for step, strengths in whole.items() if len(strengths) != 1} == {}
    assert [min(whole[step]) for step in range(1, 7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    rest = trained(tmp_path, str(tmp_path / "checkpoint-3"))
    assert rest == {step: whole[step] for step in (4, 5, 6)}


def test_recompiles_at_its_ends_alone() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    model = patch_model(fresh("bert", torch.float32, num_hidden_layers=1), "simpletron_resl", strength=0.0)
    schedule, whole, batch = StrengthSchedule(share=1.0), torch.compile(model, backend=counter), batch_of("bert")
    frames = []
    state = type("State", (), {"max_steps": 6})()
    for step in range(-1, 6):
        state.global_step = step
        schedule.on_step_begin(None, state, None, model=model)
        whole(**batch)
        frames.append(counter.frame_count)
    assert frames[1] == frames[5], "it compiles once between the ends"
    assert frames[6] > frames[5] > frames[0] > 0
    torch._dynamo.reset()


def test_sharded() -> None:
    """`fully_shard` (FSDP2) on one process: the same outputs as the whole model at every strength of a schedule."""
    python("-m", "tests.conversion.fsdp_child")
