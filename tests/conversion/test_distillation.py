"""Distillation: every family, variant and head learns what the model gave before the swap, and the teacher stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Bernoulli, Normal, kl_divergence
from torch.nn import functional as F

from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.conversion import Losses, calibrate
from hf_attn_swap.layer.registry import tiny_options
from hf_attn_swap.measuring import divergence as divergence_module
from tests import zoo
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import (
    CAUSAL_FAMILIES,
    TEXT_FAMILIES,
    batch_of,
    distance,
    forward,
    fresh,
    padding_side,
    perturb,
    swaps,
)
from tests.harness.checkpointing import ABLE, enable
from tests.harness.number_labels import NUMBERS
from tests.harness.places import SMOKES, turns

from .distilling import EVERY, HIDDEN, adapted, distiller, loss_of, moved, rows_of, teacher_of, weights_of
from .dropout import dropping

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT

CELLS = [*(("bert", variant) for variant in SMOKES), *((name, "simpletron_resl") for name in FAMILY_NAMES[1:])]


@pytest.mark.parametrize(("name", "variant"), CELLS)
def test_learns_the_teacher(name: str, variant: str, tmp_path: Path) -> None:
    """The loss falls, only what was chosen moves, and the teacher is the stock model to the bit all along."""
    batch = batch_of(name, torch.float32)
    model = perturb(patch_model(fresh(name, torch.float32), variant, **tiny_options(variant)))
    wanted = forward(fresh(name, torch.float32), batch)
    trainer = distiller(model, tmp_path, name, trainable=("query", "value", "swap"))
    chosen = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    before, first = weights_of(model), loss_of(trainer, batch)
    assert torch.equal(teacher_of(trainer, batch), wanted)
    if first < 1e-3:
        trainer.args.learning_rate = 1e-4  # steps of an adaptive optimiser do not shrink with the loss
    trainer.train()
    last = loss_of(trainer, batch)
    assert last < 0.95 * first or first < 1e-7
    changed = moved(model, before)
    assert changed <= chosen
    assert changed or variant == "softmax"
    assert torch.equal(teacher_of(trainer, batch), wanted)
    assert {key: value.shape for key, value in model.state_dict().items()} == {
        key: value.shape for key, value in before.items()
    }


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("losses", [EVERY, Losses(logits=0.0, hidden=1.0, hidden_layers="last")], ids=["all", "last"])
def test_a_fresh_student_at_strength_0_has_nothing_to_learn(name: str, losses: Losses, tmp_path: Path) -> None:
    model = patch_model(fresh(name, torch.float32), "modern_hopfield")
    trainer = distiller(model, tmp_path, name, trainable="all", losses=losses)
    batch = batch_of(name, torch.float32)
    assert loss_of(trainer, batch) > 1e-4
    set_strength(model, 0.0)
    assert abs(loss_of(trainer, batch)) < 1e-6
    loss = trainer.compute_loss(model.train(), batch)
    loss.backward()
    assert all(p.grad is None or float(p.grad.abs().max()) < 1e-4 for p in model.parameters())


# -- The terms of the loss ---------------------------------------------------------------------------------------------


def by_hand(stock: Any, model: Any, batch: dict[str, Any], losses: Losses) -> float:
    """The loss of LLaMA from the outputs of two models, row by row, without the package's own code."""
    mask = batch["attention_mask"].bool()
    cores = [[layer.self_attn for layer in each.model.layers] for each in (model, stock)]
    caught: list[Any] = []
    handles = [
        core.register_forward_hook(lambda _, args, kwargs, out: caught.append((kwargs, out[0])), with_kwargs=True)
        for core in (*cores[0], *cores[1])
    ]
    with torch.no_grad():
        ours, theirs = (each(**batch, output_hidden_states=True, use_cache=False) for each in (model, stock))
    for handle in handles:
        handle.remove()
    layer_pairs = []
    for core, (swapped, out), (plain, _) in zip(cores[1], caught[:3], caught[3:], strict=True):
        with torch.no_grad():  # the stock layer on the student's own stream
            layer_pairs.append((out, core(**{**plain, "hidden_states": swapped["hidden_states"]})[0]))
    hidden_pairs = list(zip(ours.hidden_states, theirs.hidden_states, strict=True))[1:]
    if losses.hidden_layers == "last":
        hidden_pairs = hidden_pairs[-1:]

    def error(pairs: list[Any]) -> float:
        found = []
        for out, target in pairs:
            for row, seen in enumerate(mask):
                difference = (out[row][seen] - target[row][seen]).square().sum()
                found.append(float(difference / target[row][seen].square().sum()))
        return sum(found) / len(found)

    terms = []
    for row, seen in enumerate(mask):
        log_p, target = (each.logits[row][seen].log_softmax(-1) for each in (ours, theirs))
        terms.append(float(F.kl_div(log_p, target, reduction="none", log_target=True).sum(-1).mean()))
    logits = sum(terms) / len(terms)
    return losses.logits * logits + losses.hidden * error(hidden_pairs) + losses.layers * error(layer_pairs)


@pytest.mark.parametrize(
    "losses",
    [
        Losses(),
        HIDDEN,
        Losses(logits=0.0, hidden=2.0, hidden_layers="last"),
        Losses(logits=0.0, layers=1.0),
        EVERY,
    ],
    ids=["logits", "hidden", "last", "layers", "every"],
)
@pytest.mark.parametrize("split", [True, False], ids=["split_head", "whole_head"])
def test_the_terms_are_those_of_the_formula(losses: Losses, split: bool, tmp_path: Path) -> None:
    """With padding, in fp64 models; the head is split from the model where it does not train."""
    batch = batch_of("llama", padded="left")
    stock, model = fresh("llama"), patch_model(fresh("llama"), "simpletron_resl", strength=0.6)
    trainer = distiller(model, tmp_path, "llama", losses=losses, trainable="body" if split else "all")
    assert loss_of(trainer, batch) == pytest.approx(by_hand(stock, model, batch, losses), rel=2e-6)
    assert (trainer.split_head is True) == (split and losses.logits > 0)


@pytest.mark.parametrize("kind", NUMBERS)
def test_outputs_that_are_numbers_are_learned(kind: str, tmp_path: Path) -> None:
    """A softmax over a single number is always 1, so its KL would teach nothing."""
    model = patch_model(zoo.build("bert", head="classification", **NUMBERS[kind]), "simpletron_resl")
    batch = batch_of("bert", torch.float32)
    trainer = distiller(model, tmp_path, trainable="body")
    before = loss_of(trainer, batch)
    ours, theirs = zoo.output(model(**batch)).detach(), teacher_of(trainer, batch)
    if model.config.problem_type == "multi_label_classification":
        pairs = [Bernoulli(logits=logits) for logits in (theirs, ours)]
        wanted = kl_divergence(*pairs).sum(-1).mean()
    else:
        wanted = kl_divergence(Normal(theirs, 1.0), Normal(ours, 1.0)).sum(-1).mean()
    assert before == pytest.approx(float(wanted), rel=1e-4)
    trainer.train()
    assert loss_of(trainer, batch) < 0.5 * before


@pytest.mark.parametrize("name", TEXT_FAMILIES)
def test_padding_does_not_count(name: str, tmp_path: Path) -> None:
    """A padded batch has the mean loss of its rows without padding, and other padding tokens change nothing."""
    model = patch_model(fresh(name), "simpletron_resl")
    trainer = distiller(model, tmp_path, name, losses=EVERY, trainable="body")
    batch = batch_of(name, padded=padding_side(name))
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)
    batch |= {"position_ids": positions} if padding_side(name) == "left" else {}
    single = [
        {key: value[row : row + 1][:, batch["attention_mask"][row].bool()] for key, value in batch.items()}
        for row in (0, 1)
    ]
    alone = sum(loss_of(trainer, each) for each in single) / 2
    assert loss_of(trainer, batch) == pytest.approx(alone, rel=2e-6)
    other = torch.where(batch["attention_mask"].bool(), batch["input_ids"], 5)
    assert loss_of(trainer, {**batch, "input_ids": other}) == pytest.approx(alone, rel=2e-6)


@pytest.mark.parametrize("name", CAUSAL_FAMILIES)
def test_a_vocabularys_logits_are_left_out(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's head computes one token of each row; the loss computes the others a chunk at a time."""
    monkeypatch.setattr(divergence_module, "CHUNK", 4 * zoo.VOCABULARY)
    batch = batch_of(name, torch.float32, padded="left")
    found = []
    for trainable in (("query", "value"), "all"):
        model = patch_model(fresh(name, torch.float32, head="lm", tie_word_embeddings=False), "simpletron_resl")
        trainer = distiller(model, tmp_path, name, trainable=trainable)
        seen: list[tuple[int, ...]] = []
        handle = model.get_output_embeddings().register_forward_hook(
            lambda _, __, output, seen=seen: seen.append(tuple(output.shape))
        )
        for _ in range(2):
            loss = trainer.compute_loss(model, batch)
        loss.backward()
        handle.remove()
        found.append((float(loss.detach()), {key: p.grad for key, p in model.named_parameters()}))
        largest = max(torch.Size(shape[:-1]).numel() for shape in seen)
        assert largest == (4 if trainable != "all" else batch["input_ids"].numel())
    (split, ours), (whole, theirs) = found
    assert split == pytest.approx(whole, rel=1e-5)
    for key, gradient in ours.items():
        if gradient is not None:
            assert distance(gradient, theirs[key]) < 1e-5, key


def test_logits_that_are_more_than_the_head_are_computed_by_the_model(tmp_path: Path) -> None:
    """Gemma 2 bounds its logits after the head, so the head alone does not give them."""
    stock = zoo.build("gemma2", head="lm", num_hidden_layers=1)
    model = patch_model(zoo.build("gemma2", head="lm", num_hidden_layers=1), "belief")
    batch = zoo.inputs("gemma2")
    trainer = distiller(model, tmp_path, "llama", trainable=("value",))
    got = loss_of(trainer, batch)
    assert trainer.split_head is False
    with torch.no_grad():
        log_p, target = (each(**batch).logits.log_softmax(-1) for each in (model, stock))
    wanted = F.kl_div(log_p, target, reduction="none", log_target=True).sum(-1).mean()
    assert got == pytest.approx(float(wanted), rel=1e-4)
    assert got > 1e-4


# -- Training ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("losses", [Losses(), EVERY], ids=["logits", "every"])
def test_accumulated_gradients(losses: Losses, tmp_path: Path) -> None:
    """Two half batches give the step of one whole batch, with rows of unequal length and with labels beside them."""
    batch = batch_of("bert", padded="right")  # Trainer would divide by the number of labels if it was let
    rows = rows_of({**batch, "labels": batch["input_ids"]}, 2)
    found = []
    for size, steps in ((4, 1), (2, 2)):
        model = patch_model(fresh("bert"), "simpletron_resl")
        words = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 1}
        words |= {"optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "lr_scheduler_type": "constant"}
        trainer = distiller(model, tmp_path, losses=losses, trainable="all", args=words, train_dataset=rows)
        trainer.train()
        found.append(weights_of(model))
    start = fresh("bert").state_dict()
    for key, value in found[0].items():
        step = (value - start[key]).abs().max() if key in start else torch.zeros(())
        assert float((found[1][key] - value).abs().max()) <= 1e-5 * float(step) + 1e-12, key
    assert moved(fresh("bert"), {key: found[0][key] for key in start})


WAYS = [(False, False), (True, True), (False, True), (True, False)]  # checkpointed, with adapters


@pytest.mark.parametrize(("name", "way"), turns(FAMILY_NAMES, WAYS))
def test_trains_without_dropout(name: str, way: tuple[bool, bool], tmp_path: Path) -> None:
    """The trained weights are those of a model whose config has no dropout, which `convert` and users deploy."""
    checkpointed, adapters = way
    if checkpointed and name not in ABLE:
        pytest.skip("transformers has no activation checkpointing for this family")
    found = []
    for rates in (dict.fromkeys(dropping(name), 0.0), dropping(name)):
        model = patch_model(fresh(name, torch.float32, **rates), "modern_hopfield")
        student = adapted(model, name, lora_dropout=0.5 if any(rates.values()) else 0.0) if adapters else model
        if checkpointed:
            enable(model, activation_checkpointing_kwargs={"use_reentrant": False})
        arguments = {"num_train_epochs": 1}
        trainer = distiller(student, tmp_path, name, args=arguments, trainable=None if adapters else "body")
        before, start, runs = rates_of(model), weights_of(student), layer_runs(model)
        trainer.train()
        per_step = len(runs) / trainer.state.global_step
        assert per_step == (2 if checkpointed else 1) * model.config.num_hidden_layers, "once for each pass"
        assert rates_of(model) == before
        assert moved(student, start)
        found.append({key: value for key, value in student.state_dict().items() if "lora_" in key or not adapters})
    assert all(torch.equal(one, found[1][key]) for key, one in found[0].items())


def test_frozen_parameters_of_the_variant_are_named(tmp_path: Path) -> None:
    model = adapted(patch_model(fresh("bert", torch.float32), "gated"))
    with pytest.warns(UserWarning, match="modules_to_save"):
        distiller(model, tmp_path, args={"num_train_epochs": 1}).train()


def rates_of(model: Any) -> list[tuple[str, str, float]]:
    """Every rate of dropout in the model's modules."""
    return [
        (path, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(module, torch.nn.Dropout)))
    ]


def layer_runs(model: Any) -> list[bool]:
    """Fills up with an entry for each run of a swapped layer with gradients."""
    runs: list[bool] = []
    for swap in swaps(model):
        swap.register_forward_hook(lambda *_: runs.append(True) if torch.is_grad_enabled() else None)
    return runs


@pytest.mark.parametrize(("name", "losses"), [("bert", EVERY), ("llama", Losses())])
def test_evaluated_without_labels(name: str, losses: Losses, tmp_path: Path) -> None:
    trainer = distiller(
        patch_model(fresh(name, torch.float32), "modern_hopfield"), tmp_path, name, losses=losses, trainable="body"
    )
    batch = batch_of(name, torch.float32)
    found = trainer.evaluate(rows_of(batch, 1))
    assert found["eval_loss"] == pytest.approx(loss_of(trainer, batch), rel=1e-5)
    labelled = [{**row, "labels": 1} for row in rows_of(batch, 1)]
    assert trainer.evaluate(labelled)["eval_loss"] == pytest.approx(found["eval_loss"])


def test_steps_of_a_fitted_map_are_relative(tmp_path: Path) -> None:
    """Every parameter is in one group; those of the calibration step in proportion to their size, without decay."""
    model = patch_model(fresh("bert", torch.float32), "simpletron_resl")
    calibrate(model, [batch_of("bert", torch.float32, seed=seed) for seed in range(12)], progress=False)
    trainer = distiller(model, tmp_path, trainable=("query", "swap"), args={"weight_decay": 0.1})
    fitted = {id(p) for swap in swaps(model) for p in swap.calibration.parameters()}
    groups = trainer.create_optimizer().param_groups
    seen = [parameter for group in groups for parameter in group["params"]]
    assert sorted(map(id, seen)) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert len(fitted) == 6
    for group in groups:
        for parameter in group["params"]:
            size = min(float(parameter.detach().square().mean().sqrt()), 1.0)
            assert group["lr"] == pytest.approx(2e-3 * size if id(parameter) in fitted else 2e-3)
            assert not (group["weight_decay"] and id(parameter) in fitted)
