"""The rank correlation of a regression with its labels is SciPy's, and the margin that of the recipes' bootstrap."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy.stats import spearmanr

from hf_attn_swap import patch_model
from hf_attn_swap.measuring.held_out import HeldOut
from hf_attn_swap.measuring.lost import difference_margin, rank_correlation
from hf_attn_swap.training.metrics import paired_interval
from tests import zoo
from tests.contract.harness import batch_of


def noisy(count: int, levels: int) -> list[torch.Tensor]:
    """Labels of a few levels, and the outputs of two models that follow them more or less."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randint(levels, (count,), generator=generator).float()
    return [truth + noise * torch.randn(count, generator=generator) for noise in (2.0, 1.0)] + [truth]


@pytest.mark.parametrize("levels", [2, 5, 10_000])
def test_equals_scipy(levels: int) -> None:
    ours, _, truth = noisy(300, levels)
    assert rank_correlation(ours, truth) == pytest.approx(spearmanr(ours, truth).statistic)


def test_outputs_that_are_no_numbers_have_no_correlation() -> None:
    """And so no budget is met by them."""
    outputs = torch.arange(10.0)
    outputs[3] = math.nan
    assert math.isnan(rank_correlation(outputs, torch.arange(10.0)))
    assert math.isnan(rank_correlation(outputs, torch.ones(10)))
    assert math.isnan(difference_margin(outputs, torch.arange(10.0), torch.arange(10.0)))


def test_the_margin_is_that_of_a_bootstrap() -> None:
    ours, theirs, truth = noisy(400, 5)
    _, low, high = paired_interval("spearmanr", [ours.tolist()], [theirs.tolist()], truth.tolist())
    assert difference_margin(ours, theirs, truth) == pytest.approx((high - low) / 2, rel=0.1)


def regression() -> Any:
    return zoo.build("bert", head="classification", num_labels=1)


@pytest.mark.parametrize("whole", [False, True], ids=["fractions", "whole numbers"])
def test_held_out_rows_with_numbers(whole: bool) -> None:
    """Labels are read beside the model, and never given to it."""
    model = patch_model(regression(), "simpletron_resl")
    plain = [batch_of("bert", torch.float32, seed=seed) for seed in range(8)]
    ours, theirs = (torch.cat([one(**batch).logits.detach()[:, 0] for batch in plain]) for one in (model, regression()))
    truth = torch.arange(len(ours)) % 5 if whole else torch.randn(len(ours), generator=torch.Generator().manual_seed(0))
    parts = truth.split([len(batch["input_ids"]) for batch in plain])
    labelled = [batch | {"labels": part} for batch, part in zip(plain, parts, strict=True)]
    loss = HeldOut(model, labelled, progress=False).lost(model)
    assert loss.correlation == pytest.approx(spearmanr(ours, truth).statistic)
    assert loss.stock_correlation == pytest.approx(spearmanr(theirs, truth).statistic)
    assert loss.degradation == loss.stock_correlation - loss.correlation
    assert loss.measure == "rank correlation lost"
    assert "Rank correlation" in str(loss)
    unlabelled = HeldOut(model, plain, progress=False).lost(model)
    assert (unlabelled.correlation, unlabelled.degradation) == (None, unlabelled.relative_error)
    assert loss.divergence_or_error == loss.relative_error == unlabelled.relative_error
    constant = [batch | {"labels": torch.full((len(batch["input_ids"]),), -1.0)} for batch in plain]
    assert HeldOut(model, constant, progress=False).lost(model) == unlabelled
    labelled[0]["labels"] = torch.full_like(labelled[0]["labels"].float(), float("nan"))
    assert HeldOut(model, labelled, progress=False).lost(model) == unlabelled
