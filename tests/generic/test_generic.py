"""Architectures found by how they are written: exact at strength 0, swapped at 1, or refused by name."""

from __future__ import annotations

import copy
import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_attn_swap import describe, patch_model, set_strength, unpatch_model
from hf_attn_swap.doctor import matter
from hf_attn_swap.layer.registry import tiny_options
from hf_attn_swap.layer.swap import Swap
from tests import zoo
from tests.contract.harness import (
    assert_same,
    distance,
    forward,
    perturb,
    run,
    run_all,
    swaps,
    without_shortcut,
)
from tests.harness.places import one_per_place, turns

from .harness import (
    REFUSED,
    RUNNABLE,
    SUBJECTS,
    batch_of,
    build,
    dtype_of,
    refusal,
)


@functools.cache
def stock_run(name: str) -> Any:
    return run(build(name), batch_of(name))


@functools.cache
def stock_forward(name: str) -> torch.Tensor:
    """Without gradients, where SDPA may choose another kernel (T5's bias asks for a gradient)."""
    return forward(build(name), batch_of(name))


@pytest.mark.parametrize(("name", "variant"), RUNNABLE)
def test_exact_at_zero(name: str, variant: str) -> None:
    """Equal bits with the stock function; equal to the tolerance, in values and gradients, with the formula itself."""
    wanted, batch = stock_run(name), batch_of(name)
    model = patch_model(build(name), variant, strength=0.0, **tiny_options(variant))
    assert swaps(model)
    assert torch.equal(forward(model, batch), stock_forward(name))
    assert torch.equal(run(model, batch)[0], wanted[0])
    assert_same(run(without_shortcut(model), batch), wanted)


def takes_no_keywords(model: Any) -> bool:
    """DINOv2 of older transformers hands its layers the hidden states and nothing else."""
    layer = next((m for m in model.modules() if type(m).__name__ == "Dinov2Layer"), None)
    return layer is not None and "kwargs" not in inspect.signature(type(layer).forward).parameters


@pytest.mark.parametrize(("name", "variant"), RUNNABLE)
def test_swapped_at_one(name: str, variant: str) -> None:
    """Another output than stock, the same by the fused and the explicit path, and stock again after unpatching."""
    wanted, batch = stock_forward(name), batch_of(name)
    tolerance = 1e-11 if dtype_of(name) == torch.float64 else 3e-5
    model = perturb(patch_model(build(name), variant, **tiny_options(variant)))
    got = forward(model, batch)
    assert (distance(got, wanted) < tolerance) == (variant == "softmax")
    if takes_no_keywords(model):
        with pytest.raises(ValueError, match="does not pass keyword arguments on"):
            model(**batch, output_attentions=True)
        assert name == "dinov2"
        return
    with torch.no_grad():
        explicit = model(**batch, output_attentions=True)
    assert distance(zoo.output(explicit), got) <= tolerance
    kinds = ("attentions", "encoder_attentions", "decoder_attentions")
    weights = [w for kind in kinds if getattr(explicit, kind, None) is not None for w in getattr(explicit, kind)]
    assert len(weights) == len(swaps(model))
    assert all(w.dim() == 4 and torch.isfinite(w).all() for w in weights)
    between = forward(set_strength(model, 0.4), batch)
    assert (distance(between, got) < tolerance) == (variant == "softmax")
    with torch.no_grad():
        assert distance(zoo.output(model(**batch, output_attentions=True)), between) <= tolerance
    assert torch.equal(forward(unpatch_model(model), batch), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), RUNNABLE)
def test_fused_gradients_equal_explicit(name: str, variant: str) -> None:
    batch = batch_of(name)
    model = perturb(patch_model(build(name), variant, **tiny_options(variant)))
    fused = run_all(model, batch)
    assert_same(run_all(model, {**batch, "output_attentions": True}), fused, slack=10)


@pytest.mark.parametrize(
    ("name", "variant"), [pair for pair in turns(SUBJECTS, one_per_place()) if refusal(*pair) is None]
)
def test_save_and_load(name: str, variant: str, tmp_path: Path) -> None:
    stock, batch = build(name, torch.float32), batch_of(name, torch.float32)
    model = perturb(patch_model(build(name, torch.float32), variant, strength=0.3, **tiny_options(variant)))
    model.save_pretrained(tmp_path)
    loaded = type(stock).from_pretrained(tmp_path)
    assert str(describe(loaded)) == str(describe(model))
    assert torch.equal(forward(loaded, batch), forward(model, batch))
    assert distance(forward(unpatch_model(loaded), batch), forward(stock, batch)) <= 1e-5
    assert not any("attn_swap" in key for key in loaded.state_dict())


GENERATING = [
    (name, variant)
    for name, variant in RUNNABLE
    if (name in zoo.CAUSAL and name != "bert_cross") or name in ("t5", "whisper_whole")  # stock fails in others
]


@pytest.mark.parametrize(("name", "variant"), GENERATING)
def test_cached_generation(name: str, variant: str) -> None:
    """Token for token and in logits, past the sliding window where there is one, and from an encoder."""
    model = perturb(patch_model(build(name), variant, strength=0.7, **tiny_options(variant)))
    settings = {"max_new_tokens": 5, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    batch = batch_of(name)
    if name in zoo.CAUSAL:
        batch = batch_of(name, padded="left", length=5)
        settings |= {"eos_token_id": None, "pad_token_id": 2}
    wanted, got = (model.generate(**batch, **settings, use_cache=use_cache) for use_cache in (False, True))
    assert torch.equal(got.sequences, wanted.sequences)
    for one, two in zip(got.logits, wanted.logits, strict=True):
        assert distance(one, two) <= (1e-10 if dtype_of(name) == torch.float64 else 1e-4)


@pytest.mark.parametrize(("name", "variant"), REFUSED)
def test_refused_by_name(name: str, variant: str) -> None:
    model, batch = build(name), batch_of(name)
    wanted = forward(build(name), batch)
    with pytest.raises(ValueError, match=str(refusal(name, variant))):
        patch_model(model, variant, **tiny_options(variant))
    assert not swaps(model)
    assert torch.equal(forward(model, batch), wanted)


@pytest.mark.parametrize("variant", one_per_place())
def test_cross_attention_stays_stock(variant: str) -> None:
    """Only the self-attention of a BERT decoder changes: its cross-attention reads the encoder as before."""
    model, batch = perturb(patch_model(build("bert_cross"), variant, **tiny_options(variant))), batch_of("bert_cross")
    layer = model.bert.encoder.layer[0]
    stock = build("bert_cross").bert.encoder.layer[0]
    x = torch.randn(2, 7, model.config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    states = batch["encoder_hidden_states"]
    with torch.no_grad():
        got = layer.crossattention(x, None, states)[0]
        assert torch.equal(got, stock.crossattention(x, None, states)[0])
    assert not [swap for swap in layer.crossattention.modules() if isinstance(swap, Swap)]
    moved = {**batch, "encoder_hidden_states": states + 1}
    assert distance(forward(model, moved), forward(model, batch)) > 1e-6


@pytest.mark.parametrize("variant", one_per_place())
def test_a_container_that_returns_a_tensor(variant: str) -> None:
    """LayoutLM's container of attention gives its output alone, where BERT's gives a tuple."""
    sizes = {key: value for key, value in zoo.ENCODER.items() if key != "max_position_embeddings"}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        stock = transformers.LayoutLMModel(transformers.LayoutLMConfig(**sizes, **zoo.NO_DROPOUT)).eval()
    matter(stock)
    batch = zoo.inputs("bert")
    with torch.no_grad():
        wanted = stock(**batch).last_hidden_state
        model = patch_model(copy.deepcopy(stock), variant, strength=0.0, **tiny_options(variant))
        assert distance(without_shortcut(model)(**batch).last_hidden_state, wanted) <= 1e-5
        moved = set_strength(perturb(model), 1.0)(**batch).last_hidden_state
        assert distance(moved, wanted) > 1e-4
        assert torch.equal(unpatch_model(model)(**batch).last_hidden_state, wanted)
