"""The teacher of a distillation: the stock model to the bit, whatever trains, and without a copy of what does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import TrainerCallback

from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion import Losses, calibrate
from hf_attn_swap.conversion.trainable import with_adapters
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, distance, forward, fresh, perturb, refused, swaps
from tests.harness.adapters import lora

from .distilling import (
    EVERY,
    HIDDEN,
    adapted,
    distiller,
    loss_of,
    moved,
    rows_of,
    teacher_of,
    weights_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
WHAT = ("all", "body", ("query", "output"), "value")
CELLS = [(name, what) for name in FAMILY_NAMES for what in WHAT]
FAST = {("bert", "all"), ("albert", "body"), ("llama", "value"), ("gpt2", ("query", "output"))}


@pytest.mark.parametrize(
    ("name", "what"), [pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow) for cell in CELLS]
)
@pytest.mark.parametrize("losses", [Losses(), EVERY], ids=["logits", "every"])
def test_frozen_copies(name: str, what: Any, losses: Losses, tmp_path: Path) -> None:
    """What trains moves, the teacher does not, and copies are kept of what trains and the teacher uses alone."""
    batch = batch_of(name, torch.float32)
    whole = what in ("all", "body")
    model = perturb(patch_model(fresh(name, torch.float32), "gated+modern_hopfield" if whole else "modern_hopfield"))
    trainer = distiller(model, tmp_path, name, losses=losses, trainable=what, args={"num_train_epochs": 2})
    trains = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(trainer.teacher.frozen) == {key for key in trains if ".attn_swap." not in key}
    assert any(".attn_swap." in key for key in trains) == whole
    trains = {key for key, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    if what == "body":
        kept = {key for key in trains if "embed" in key or "wte" in key or "wpe" in key}
        assert not any(isinstance(model.get_submodule(key.rpartition(".")[0]), torch.nn.Embedding) for key in kept)
        head = model.get_output_embeddings()
        assert head is None or not any(parameter.requires_grad for parameter in head.parameters())
    wanted, before = forward(fresh(name, torch.float32), batch), weights_of(model)
    assert torch.equal(teacher_of(trainer, batch), wanted)
    trainer.train()
    assert trains >= moved(model, before) != set()
    assert torch.equal(teacher_of(trainer, batch), wanted)
    assert not torch.equal(forward(set_strength(model, 0.0), batch), wanted), "the student's own weights moved"


ADAPTED = [
    pytest.param(name, more, id=f"{name}-{label}", marks=() if name in fast else pytest.mark.slow)
    for label, more, fast in (
        ("plain", {}, ("llama",)),
        ("dropout", {"lora_dropout": 0.3}, ("vit",)),
        ("swap", {"modules_to_save": ["attn_swap"]}, ("gpt2",)),
        ("dora", {"use_dora": True}, ()),
    )
    for name in FAMILY_NAMES
]


@pytest.mark.parametrize(("name", "more"), ADAPTED)
def test_adapters(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Only the adapters move, no weight is copied, and the teacher runs without them."""
    batch = batch_of(name, torch.float32)
    variant = "gated" if "modules_to_save" in more else "modern_hopfield"
    model = adapted(perturb(patch_model(fresh(name, torch.float32), variant)), name, **more)
    trainer = distiller(model, tmp_path, name)
    assert trainer.teacher.frozen == {}
    wanted = forward(fresh(name, torch.float32), batch)
    before, first = weights_of(model), loss_of(trainer, batch)
    assert torch.equal(teacher_of(trainer, batch), wanted)
    trainer.train()
    changed = moved(model, before)
    assert changed
    assert all("lora_" in key or "modules_to_save" in key for key in changed)
    assert any("modules_to_save" in key for key in changed) == ("modules_to_save" in more)
    assert loss_of(trainer, batch) < first
    assert torch.equal(teacher_of(trainer, batch), wanted)


@pytest.mark.parametrize("wrapped", [True, False], ids=["get_peft_model", "inject_adapter_in_model"])
def test_adapters_that_trained_before(wrapped: bool, tmp_path: Path) -> None:
    """Adapters with an effect are off in the teacher, in PEFT's wrapper and inside the model, and on again after it."""
    batch, config = batch_of("bert", torch.float32), lora("bert")
    model: Any = fresh("bert", torch.float32)
    if wrapped:
        model = patch_model(peft.get_peft_model(model, config), "belief")
    else:
        peft.inject_adapter_in_model(config, model)  # transformers' add_adapter may ask for a later PEFT
        patch_model(model, "belief")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.add_(0.1)
    trainer = distiller(model, tmp_path)
    student = forward(model.eval(), batch)
    wanted = forward(fresh("bert", torch.float32), batch)
    assert trainer.teacher.frozen == {}
    assert torch.equal(teacher_of(trainer, batch), wanted)
    assert torch.equal(forward(model, batch), student)
    trainer.train()
    assert torch.equal(teacher_of(trainer, batch), wanted)
    assert not torch.equal(forward(model.eval(), batch), student)


@pytest.mark.parametrize("name", ["bert", *(pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "vit"))])
@pytest.mark.parametrize("losses", [Losses(), EVERY], ids=["logits", "every"])
def test_another_model(name: str, losses: Losses, tmp_path: Path) -> None:
    """Another model's outputs are the target; it is frozen, in evaluation mode, and keeps its weights."""
    batch = batch_of(name, torch.float32)
    teacher = patch_model(fresh(name, torch.float32), "softmax").train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    model = patch_model(fresh(name, torch.float32), "simpletron_resl")
    wanted, before = forward(teacher, batch), weights_of(teacher)
    trainer = distiller(model, tmp_path, name, teacher=teacher, losses=losses, trainable="body")
    assert trainer.teacher.frozen == {}
    assert torch.equal(teacher_of(trainer, batch), wanted)
    first = loss_of(trainer, batch)
    trainer.train()
    assert loss_of(trainer, batch) < 0.9 * first
    assert not moved(teacher, before)
    assert not any(module.training for module in teacher.modules())
    assert not any(parameter.requires_grad for parameter in teacher.parameters())
    assert torch.equal(teacher_of(trainer, batch), wanted)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("llama", "vit") else pytest.mark.slow) for name in FAMILY_NAMES]
)
def test_merged_and_reloaded(name: str, tmp_path: Path) -> None:
    """Without adapters the model that was trained; with adapters a plain model of the same outputs, which saves."""
    batch = batch_of(name, torch.float32)
    model = adapted(patch_model(fresh(name, torch.float32), "gated"), name, modules_to_save=["attn_swap"])
    trainer = distiller(perturb(model), tmp_path, name, args={"num_train_epochs": 1})
    trainer.train()
    wanted = forward(model.eval(), batch)
    merged = trainer.merge_and_unload()
    assert type(merged) is type(fresh(name, torch.float32))
    assert not any("lora_" in key or "modules_to_save" in key for key in merged.state_dict())
    assert distance(forward(merged, batch), wanted) < 1e-5
    assert len(swaps(merged)) == len(swaps(patch_model(fresh(name, torch.float32), "gated")))
    merged.save_pretrained(tmp_path / "saved")
    loaded = type(merged).from_pretrained(tmp_path / "saved")
    assert torch.equal(forward(loaded, batch), forward(merged, batch))
    assert not torch.equal(forward(unpatch_model(loaded), batch), forward(fresh(name, torch.float32), batch))
    plain = patch_model(fresh(name, torch.float32), "gated")
    assert distiller(plain, tmp_path, name, trainable="body").merge_and_unload() is plain


def retrained(model: Any) -> bool:
    """What the config says, which is what a checkpoint keeps."""
    (swap,) = model.config.attn_swap["swaps"]
    return bool(swap.get("retrained", False))


@pytest.mark.filterwarnings("ignore:layers .* lose the converted:UserWarning")
def test_a_distilled_model_is_no_teacher_of_itself(tmp_path: Path) -> None:
    """Training that changes the original is noted, kept by a checkpoint, and refused where the original is needed."""
    batch = batch_of("bert", torch.float32)
    batches = [batch_of("bert", torch.float32, seed=seed) for seed in range(12)]
    model = patch_model(fresh("bert", torch.float32), "belief")
    distiller(model, tmp_path, trainable="body", args={"num_train_epochs": 1}).train()
    assert retrained(model)
    model.save_pretrained(tmp_path / "saved")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    for each in (model, loaded):
        with refused("an earlier conversion changed its weights, so strength 0 is no longer the original; pass the"):
            distiller(each, tmp_path, trainable="body")
        with refused("there is no original attention left to fit to"):
            calibrate(each, batches, progress=False)
    stock = fresh("bert", torch.float32)
    again = distiller(loaded, tmp_path, trainable="body", teacher=stock)
    assert torch.equal(teacher_of(again, batch), forward(stock, batch))
    assert retrained(patch_model(loaded, "gated")), "strength 0 of a new swap is not the original model either"


class Stops(TrainerCallback):
    """Interrupts a training after some steps."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step == self.steps:
            raise KeyboardInterrupt


@pytest.mark.parametrize("steps", [0, 2])
def test_an_interrupted_training_is_noted(steps: int, tmp_path: Path) -> None:
    """Not before its first step: then the original is still there."""
    model = patch_model(fresh("bert", torch.float32), "belief")
    before = weights_of(model)
    with pytest.raises(KeyboardInterrupt):
        distiller(model, tmp_path, trainable="body", callbacks=[Stops(steps)]).train()
    assert bool(moved(model, before)) is retrained(model) is (steps > 0)


def test_a_checkpoint_in_the_middle_is_noted(tmp_path: Path) -> None:
    model = patch_model(fresh("bert", torch.float32), "belief")
    args = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    distiller(model, tmp_path, trainable="body", args=args).train()
    assert retrained(type(model).from_pretrained(tmp_path / "checkpoint-2"))


def test_the_best_checkpoint_is_loaded_whole(tmp_path: Path) -> None:
    """Adapters, and the variant's own parameters beside them."""
    model = with_adapters(patch_model(fresh("bert", torch.float32), "outeffhop+gated"), 4)
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    steps = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 6}
    held = rows_of(batch_of("bert", torch.float32, seed=9), 2)
    trainer = distiller(model, tmp_path, args={"learning_rate": 0.1, **steps, **best}, losses=HIDDEN, eval_dataset=held)
    trainer.train()
    values = {entry["step"]: entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert max(values.values()) > min(values.values())
    assert trainer.evaluate()["eval_loss"] == max(values.values())


def test_adapters_leave_the_original_until_they_are_merged(tmp_path: Path) -> None:
    model = adapted(patch_model(fresh("bert", torch.float32), "belief"), "bert")
    root = model.get_base_model()
    trainer = distiller(model, tmp_path, args={"num_train_epochs": 1})
    trainer.train()
    assert not retrained(root)
    distiller(model, tmp_path)  # so they can train on
    assert retrained(trainer.merge_and_unload())


# -- Wrong inputs, each in one line ------------------------------------------------------------------------------------


def patched(**more: Any) -> Any:
    return patch_model(fresh("bert", torch.float32, **more), "modern_hopfield")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"teacher": lambda: fresh("bert", vocab_size=70)}, "the teacher has vocab_size = 70 and the model has 64"),
        ({"teacher": lambda: fresh("bert", num_labels=5)}, "the teacher has num_labels = 5 and the model has 2"),
        ({"teacher": lambda: torch.nn.Linear(2, 2)}, "the teacher must be a transformers model, got Linear"),
        ({"train_dataset": list}, "the training data are empty"),
        ({"trainable": lambda: "nothing"}, "swap, vectors, or 'all' or 'body' alone"),
        ({"trainable": lambda: ("query", "all")}, "must be some of query, key, value, output, swap, vectors"),
        ({"trainable": lambda: "swap"}, "there is nothing to train"),
    ],
    ids=["vocabulary", "classes", "no model", "no rows", "unknown", "mixed", "no parameters"],
)
def test_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    values = {"trainable": "body"} | {key: make() for key, make in change.items()}
    with refused(reason):
        distiller(patched(), tmp_path, **values)


def test_states_refused(tmp_path: Path) -> None:
    with refused("not patched"):
        distiller(fresh("bert"), tmp_path)
    with refused("the model is at strength 0, the teacher itself"):
        distiller(set_strength(patched(), 0.0), tmp_path)
    with refused("there is nothing to train"):
        distiller(patched().requires_grad_(False), tmp_path)
