"""What a swap lost, against the plain formulas; and never against something that is no longer the stock model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from hf_attn_swap import patch_model, set_strength
from hf_attn_swap.analysis import lost
from tests.contract.harness import batch_of, fresh, padding_side, refused


def padded(name: str) -> dict[str, Any]:
    return batch_of(name, torch.float32, padded=padding_side(name))


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama"])
def test_language_model(name: str) -> None:
    """KL, agreement and perplexity over real tokens alone, with the same model and with a second one as the stock."""
    batch, stock = padded(name), fresh(name, torch.float32, head="lm")
    model = patch_model(fresh(name, torch.float32, head="lm"), "belief")
    loss = lost(model, [batch, batch])
    assert loss == lost(model, [batch, batch], stock=stock)
    real = batch["attention_mask"].bool()
    both = real[:, :-1] & real[:, 1:]
    target = batch["input_ids"][:, 1:][both]
    with torch.no_grad():
        ours, theirs = model(**batch).logits, stock(**batch).logits
    wanted = kl_div(ours.log_softmax(-1)[real], theirs.log_softmax(-1)[real], log_target=True, reduction="batchmean")
    assert loss.tokens == 2 * int(real.sum())
    assert loss.divergence == pytest.approx(float(wanted), rel=1e-4)
    assert loss.divergence > 0
    same = (ours.argmax(-1) == theirs.argmax(-1))[real].float().mean()
    assert loss.agreement == pytest.approx(float(same))
    for got, logits in ((loss.perplexity, ours), (loss.stock_perplexity, theirs)):
        assert got == pytest.approx(float(cross_entropy(logits[:, :-1][both], target).exp()), rel=1e-4)
    assert len(str(loss).splitlines()) == 3


def test_nothing_is_lost_at_strength_0() -> None:
    model = set_strength(patch_model(fresh("llama", torch.float32, head="lm"), "modern_hopfield"), 0.0)
    loss = lost(model, padded("llama"))
    assert (loss.divergence, loss.agreement, loss.ratio) == (pytest.approx(0, abs=1e-6), 1.0, 1.0)


def test_model_without_head() -> None:
    batch = padded("bert")
    model = patch_model(fresh("bert", torch.float32).base_model, "simpletron_resl").train()
    loss = lost(model, [batch])
    assert (loss.divergence, loss.perplexity) == (None, None)
    assert loss.relative_error is not None
    assert loss.relative_error > 1e-3
    assert model.training, "the mode is as before"
    assert lost(set_strength(model, 0.0), [batch]).relative_error == 0


def test_strength_0_is_not_always_the_stock_model() -> None:
    batch = padded("llama")
    model = patch_model(fresh("llama", torch.float32, head="lm"), "belief")
    model.model.layers[0].self_attn.attn_swap.retrained = True
    with refused("strength 0 is no longer the stock model; pass stock="):
        lost(model, [batch])
    assert lost(model, [batch], stock=fresh("llama", torch.float32, head="lm")).divergence is not None
    with refused("not patched"):
        lost(fresh("llama", torch.float32, head="lm"), [batch])
