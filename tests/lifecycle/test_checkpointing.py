"""Activation checkpointing gives the same loss and gradients, dropout included, for every variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.layer.swap import Swap
from tests.contract.harness import assert_same, batch_of, fresh, perturb, run_all, swaps
from tests.harness.checkpointing import ABLE, enable
from tests.harness.places import one_per_place, turns


def prepare(name: str, variant: str, strength: float, dropout: float) -> Any:
    rates = {key: dropout for key in DROPOUTS if key in fresh(name).config.to_dict()}
    assert rates or not dropout or name == "llama"
    model = patch_model(fresh(name, **rates), variant, strength=strength)
    return perturb(model).train()


DROPOUTS = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "resid_pdrop", "attn_pdrop", "embd_pdrop"),
    *("dropout", "attention_dropout"),
)


def trained(model: Any, name: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return run_all(model, batch_of(name, padded=None))


ARGUMENTS: list[dict[str, Any]] = [{}, {"activation_checkpointing_kwargs": {"use_reentrant": False}}]


@pytest.mark.parametrize(
    ("name", "variant", "arguments"),
    [(*row, how) for row, how in turns(turns(ABLE, one_per_place()), ARGUMENTS)],
    ids=str,
)
def test_same_loss_and_gradients(name: str, variant: str, arguments: dict[str, Any]) -> None:
    """By default at full strength and with dropout, and with explicit arguments in between."""
    model = prepare(name, variant, strength=0.4 if arguments else 1.0, dropout=0.0 if arguments else 0.2)
    wanted = trained(model, name)
    enable(model, **arguments)
    assert_same(trained(model, name), wanted)


def test_it_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = prepare("bert", "modern_hopfield", 1.0, 0.0)
    enable(model)
    calls = []
    stock = Swap.forward
    monkeypatch.setattr(Swap, "forward", lambda self, *args: calls.append(self) or stock(self, *args))
    trained(model, "bert")
    assert len(calls) == 2 * len(swaps(model))
