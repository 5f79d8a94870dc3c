"""Held-out rows give what `lost` gives, whatever of the stock model they keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_attn_swap.measuring.held_out as module
from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.analysis import lost
from hf_attn_swap.measuring.held_out import HeldOut
from hf_attn_swap.measuring.lost import Sums
from hf_attn_swap.training.metrics import paired_interval
from tests import zoo
from tests.contract.harness import batch_of, fresh, padding_side, refused, swaps
from tests.harness.number_labels import NUMBERS


def stock(name: str, **overrides: Any) -> Any:
    return fresh(name, torch.float32, **overrides)


def batches(name: str, **more: Any) -> list[dict[str, Any]]:
    """Two batches, one of them with padding, and of unequal length."""
    two = batch_of(name, torch.float32, seed=3)
    if "input_ids" in two:
        two = {key: value[:, :4] if value.dim() == 2 else value for key, value in two.items()}
    return [batch_of(name, torch.float32, padded=padding_side(name)) | more, two | more]


@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("llama", "belief"),
        ("gpt2", "modern_hopfield"),
        ("bert", "simpletron_resl"),
        ("vit", "modern_hopfield"),
        pytest.param("t5", "belief", marks=pytest.mark.slow),
        ("gemma2", "modern_hopfield"),
    ],
)
@pytest.mark.parametrize("few", [1024, 8])
def test_equals_lost(name: str, variant: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With logits; or with hidden states, where the logits are the head's output on them (not in gemma2 and bert)."""
    monkeypatch.setattr(module, "FEW", few)
    model = patch_model(stock(name), variant).train()
    held = HeldOut(model, batches(name), progress=False)
    hidden = [kept.hidden is not None for kept in held.kept]
    assert hidden == [few == 8 and name in ("llama", "gpt2")] * 2
    assert all((kept.logits is None) == (kept.hidden is not None) for kept in held.kept)
    for _ in range(2):
        assert held.lost(model) == lost(model, batches(name))
    set_strength(model, 0.5)
    assert held.lost(model) == lost(model, batches(name))
    assert held.lost(model).divergence_or_error > 0
    assert model.training
    set_strength(model, 0.0)
    assert held.lost(model).divergence_or_error == 0


def test_a_head_that_trains_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FEW", 8)
    model = patch_model(stock("llama"), "belief")
    held = HeldOut(model, batches("llama"), head_trains=True, progress=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.5)
    assert held.lost(model) == lost(model, batches("llama"), stock=stock("llama"))


@pytest.mark.parametrize("name", ["label", "labels", "label_ids"])
def test_accuracy_by_hand(name: str) -> None:
    """Labels are read beside the model, and never given to it."""
    model = patch_model(stock("vit"), "simpletron_resl")
    plain = [batch_of("vit", torch.float32, seed=seed) for seed in range(6)]
    logits = [torch.cat([one(**batch).logits.detach() for batch in plain]) for one in (model, stock("vit"))]
    truth = torch.tensor([0, 1, 2] * 4)
    labelled = [batch | {name: truth[2 * place : 2 * place + 2]} for place, batch in enumerate(plain)]
    loss = HeldOut(model, labelled, progress=False).lost(model)
    ours, theirs = ((logit.argmax(-1) == truth).float().mean().item() for logit in logits)
    assert (loss.accuracy, loss.stock_accuracy) == (pytest.approx(ours), pytest.approx(theirs))
    assert ours != theirs
    assert (loss.degradation, loss.measure) == (pytest.approx(theirs - ours), "accuracy lost")
    assert (loss.tokens, loss.per_token) == (12, False)
    unlabelled = HeldOut(model, plain, progress=False).lost(model)
    assert unlabelled.degradation == 1 - unlabelled.agreement
    assert unlabelled.accuracy_margin is None
    assert unlabelled.measure == "rows with another first choice"
    wrong = [batch | {name: torch.full((2,), float("nan"))} for batch in plain]
    assert HeldOut(model, wrong, progress=False).lost(model) == unlabelled


def test_the_margin_of_the_accuracy_is_that_of_a_bootstrap() -> None:
    generator = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(2000, 3, generator=generator) for _ in range(2))
    theirs[:1500] = ours[:1500]
    truth = ours.argmax(-1).where(torch.rand(2000, generator=generator) < 0.9, torch.zeros(2000, dtype=torch.long))
    sums = Sums(causal=False, numbers=False)
    for some in (slice(0, 700), slice(700, 2000)):
        sums.add_logits(ours[some], theirs[some], {}, truth[some])
    result = sums.result()
    assert result.accuracy is not None
    assert result.stock_accuracy is not None
    assert result.accuracy_margin is not None
    guesses = [ours.argmax(-1).tolist()], [theirs.argmax(-1).tolist()]
    mean, low, high = paired_interval("accuracy", *guesses, truth.tolist(), samples=4000)
    assert mean == pytest.approx(result.accuracy - result.stock_accuracy)
    assert (high - low) / 2 == pytest.approx(result.accuracy_margin, rel=0.05)
    assert "± " in str(result)


@pytest.mark.parametrize("kind", NUMBERS)
def test_outputs_that_are_numbers(kind: str) -> None:
    """The squares are summed over all rows, since one output may be close to 0."""
    model = patch_model(zoo.build("bert", head="classification", **NUMBERS[kind]), "simpletron_resl")
    other = zoo.build("bert", head="classification", **NUMBERS[kind])
    given = batches("bert")
    loss = HeldOut(model, [batch | {"labels": torch.tensor([1, 3])} for batch in given], progress=False).lost(model)
    ours, theirs = (torch.cat([one(**batch).logits.detach() for batch in given]) for one in (model, other))
    wanted = float((ours - theirs).square().sum() / theirs.square().sum())
    assert loss.relative_error == pytest.approx(wanted, rel=1e-5)
    assert (loss.divergence, loss.accuracy, loss.tokens) == (None, None, 2 * len(given))
    assert lost(model, given, stock=other).relative_error == pytest.approx(wanted, rel=1e-5)


def test_a_subset_of_the_batches() -> None:
    """As many as asked for, at even distances, and measured alone."""
    model = fresh("llama", torch.float32)
    batches = [{"input_ids": torch.arange(6)[None] + start} for start in range(8)]
    held = HeldOut(patch_model(model, "simpletron_resl"), batches, progress=False)
    subset = held.subset(3)
    assert [int(kept.batch["input_ids"][0, 0]) for kept in subset.kept] == [0, 2, 5]
    assert len(held.kept) == 8
    alone = HeldOut(model, [batches[start] for start in (0, 2, 5)], progress=False)
    assert subset.lost(model) == alone.lost(model)
    assert len(held.subset(99).kept) == 8
    assert len(held.subset(0).kept) == 1


def test_as_it_is() -> None:
    """A patched model counts at strength 0, or as it is; and at strength 0 only if that is the stock model still."""
    model = patch_model(stock("llama"), "simpletron_resl")
    assert HeldOut(model, batches("llama"), progress=False).lost(model).divergence_or_error > 0
    held = HeldOut(model, batches("llama"), as_it_is=True, progress=False)
    assert held.lost(model).divergence_or_error == 0
    assert held.baseline() == held.lost(model)
    assert held.baseline().perplexity == lost(model, batches("llama"), stock=model).perplexity
    for swap in swaps(model):
        swap.retrained = True
    with refused("strength 0 is no longer the stock model"):
        HeldOut(model, batches("llama"), progress=False)
    assert HeldOut(model, batches("llama"), as_it_is=True, progress=False).lost(model).divergence_or_error == 0


def test_a_subset_of_rows_keeps_logits_that_are_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are equal to the bit, and the stock model's head computes its logits no more."""
    monkeypatch.setattr(module, "FEW", 1)
    model = patch_model(stock("llama"), "belief")
    held = HeldOut(model, batches("llama"), progress=False)
    kept = held.subset_of_rows(2, 1)
    monkeypatch.setattr(module, "MOST", 0)
    whole = held.subset_of_rows(2, 1)
    assert all(row.hidden is None and row.logits is not None for row in kept.kept)
    assert all(row.hidden is not None and row.logits is None for row in (*whole.kept, *held.kept))
    assert kept.lost(model) == whole.lost(model)
    assert kept.lost(model).divergence > 0
