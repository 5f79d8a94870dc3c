"""Attention transfer trains the chosen parameters, reads the chosen inputs, and does not change the teacher."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch

from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.conversion import calibrate, merge_calibration
from hf_attn_swap.conversion.dropout import checkpointed_layers_without_dropout
from hf_attn_swap.layer.registry import tiny_options
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import (
    CAUSAL_FAMILIES,
    TEXT_FAMILIES,
    batch_of,
    distance,
    fresh,
    padding_side,
    perturb,
    refused,
    swaps,
)
from tests.harness.checkpointing import ABLE, enable
from tests.harness.places import SMOKES
from tests.harness.transfer import loss_of, trainer_of

from .dropout import dropping

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("variant", SMOKES)
def test_learns_the_original(name: str, variant: str, tmp_path: Path) -> None:
    """The loss falls, only what was chosen moves, and the model goes on with the original's outputs all along."""
    batch, stock = batch_of(name, torch.float32), fresh(name, torch.float32)
    options = {"gamma": -0.025} if variant == "clipped_softmax" else {}  # the default of a ViT changes all but nothing
    model = perturb(patch_model(fresh(name, torch.float32), variant, **options, **tiny_options(variant)))
    trainer = trainer_of(model, tmp_path, name, trainable=("query", "key", "value", "swap"))
    chosen = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    first = loss_of(trainer, batch)
    trainer.train()
    last = loss_of(trainer, batch)
    assert last < 0.99 * first or first < 1e-9
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved <= chosen
    assert moved or variant == "softmax"
    with torch.no_grad():
        _, outputs = trainer.compute_loss(model, batch, return_outputs=True)
        given, wanted = outputs["logits"], stock(**batch)[0]  # of a language model the last token's alone
        assert (given - wanted[:, -given.shape[1] :]).abs().max() < 1e-5


def test_softmax_has_nothing_to_learn(tmp_path: Path) -> None:
    trainer = trainer_of(patch_model(fresh("bert", torch.float32), "softmax"), tmp_path)
    assert loss_of(trainer, batch_of("bert")) < 1e-12


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_padding_and_labels_do_not_count(name: str, tmp_path: Path) -> None:
    model = patch_model(fresh(name), "simpletron_resl")
    trainer = trainer_of(model, tmp_path, name)
    batch = batch_of(name, padded=padding_side(name))
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    batch |= {"position_ids": positions} if padding_side(name) == "left" else {}
    single = [
        {key: value[row : row + 1][:, batch["attention_mask"][row].bool()] for key, value in batch.items()}
        for row in (0, 1)
    ]
    alone = sum(loss_of(trainer, each) for each in single) / 2
    assert loss_of(trainer, {**batch, "labels": None}) == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_dropout_is_off(name: str, tmp_path: Path) -> None:
    """The Trainer puts the model in training mode before each step; both still see the same."""
    model = patch_model(fresh(name, **dropping(name)), "belief")
    trainer, batch = trainer_of(model, tmp_path, name), batch_of(name)
    wanted = loss_of(trainer, batch)
    assert wanted > 1e-6
    assert loss_of(trainer, batch) == wanted
    model.train()
    torch.manual_seed(0)
    assert not torch.equal(model(**batch)[0], model(**batch)[0]), "there is dropout in this model"
    assert loss_of(trainer, batch) == wanted


@pytest.mark.parametrize("name", ABLE)
@pytest.mark.parametrize("variant", ["modern_hopfield", "simpletron_resl"])
def test_activation_checkpointing(name: str, variant: str, tmp_path: Path) -> None:
    """The same loss and gradients; the layers are computed again, and without the teacher's output in their place."""
    batch, found = batch_of(name), []
    for checkpointed in (False, True):
        model = patch_model(fresh(name, **dropping(name)), variant, **tiny_options(variant))
        trainer = trainer_of(model, tmp_path, name)
        if checkpointed:
            enable(model, activation_checkpointing_kwargs={"use_reentrant": False})
        with checkpointed_layers_without_dropout(model):
            loss = trainer.compute_loss(model.train(), batch)
            again: list[int] = []
            for swap in swaps(model):
                swap.register_forward_hook(lambda *_, again=again: again.append(1))
            loss.backward()
        assert len(again) == (len(swaps(model)) if checkpointed else 0)
        found.append((float(loss.detach()), {key: p.grad for key, p in model.named_parameters()}))
    (plain, wanted), (saved, got) = found
    assert saved == pytest.approx(plain, rel=1e-9)
    assert any(gradient is not None for gradient in wanted.values())
    for key, gradient in wanted.items():
        assert (gradient is None) == (got[key] is None)
        if gradient is not None:
            assert distance(got[key], gradient) < 1e-9, key


def test_adapters_alone(tmp_path: Path) -> None:
    base = patch_model(fresh("bert", torch.float32), "simpletron_resl")
    calibrate(base, [batch_of("bert", torch.float32, seed=seed) for seed in range(12)], progress=False)
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["query", "key"]))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    trainer = trainer_of(model, tmp_path, trainable="adapters")
    first = loss_of(trainer, batch_of("bert"))
    trainer.train()
    assert loss_of(trainer, batch_of("bert")) < first
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert moved
    assert all("lora_" in key for key in moved)


def test_adapters_that_leave_the_variant_frozen(tmp_path: Path) -> None:
    base = patch_model(fresh("bert", torch.float32), "gated")
    model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["query", "key"]))
    with pytest.warns(UserWarning, match="modules_to_save"):
        trainer_of(model, tmp_path, trainable="adapters").train()


def test_evaluated_without_labels(tmp_path: Path) -> None:
    trainer = trainer_of(patch_model(fresh("bert", torch.float32), "modern_hopfield"), tmp_path)
    batch = batch_of("bert", torch.float32)
    found = trainer.evaluate([{key: value[row] for key, value in batch.items()} for row in (0, 1)])
    assert found["eval_loss"] == pytest.approx(loss_of(trainer, batch), rel=1e-5)


def test_refused(tmp_path: Path) -> None:
    with refused("not patched"):
        trainer_of(fresh("bert"), tmp_path)
    with refused("is at strength 0, the original itself"):
        trainer_of(patch_model(fresh("bert"), "modern_hopfield", strength=0.0), tmp_path)
    for wrong in ("nothing", ("query", "adapters"), ()):
        with refused("must be some of query, key, value, output, swap"):
            trainer_of(patch_model(fresh("bert"), "modern_hopfield"), tmp_path, trainable=wrong)
    with refused("there is nothing to train"):
        trainer_of(patch_model(fresh("bert"), "modern_hopfield"), tmp_path, trainable=("swap",))
    merged = patch_model(fresh("bert"), "modern_hopfield")
    calibrate(merged, [batch_of("bert", seed=seed) for seed in range(12)], progress=False)
    with refused("its calibration was merged"):
        trainer_of(merge_calibration(set_strength(merged, 1.0)), tmp_path)


@pytest.mark.parametrize("name", [name for name in FAMILY_NAMES if name in CAUSAL_FAMILIES])
def test_a_vocabularys_logits_are_left_out(name: str, tmp_path: Path) -> None:
    model = patch_model(fresh(name, torch.float32, head="lm"), "belief")
    trainer, batch = trainer_of(model, tmp_path, name, trainable="query"), batch_of(name, torch.float32)
    seen: list[tuple[int, ...]] = []
    model.get_output_embeddings().register_forward_hook(lambda _, __, output: seen.append(tuple(output.shape[:2])))
    loss_of(trainer, batch)
    assert seen == [(len(batch["input_ids"]), 1)]
