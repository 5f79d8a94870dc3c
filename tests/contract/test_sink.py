"""Pairs beside the keys of a text are what they stand for: a token before the text, a zero key, more keys for SDPA."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.bench_caches import with_cache
from hf_attn_swap import describe, patch_model
from hf_attn_swap.kernels import softmax_n as kernel
from hf_attn_swap.kernels.dispatch import Form
from tests import zoo
from tests.harness.places import turns

from .cells import EVERY, swap_in
from .harness import (
    FAMILY_NAMES,
    LENGTH,
    TOLERANCE,
    Recorder,
    assert_same,
    batch_of,
    distance,
    forward,
    fresh,
    padding_side,
    perturb,
    refused,
    run,
    run_all,
    swaps,
)  # fmt: skip

EXACT = TOLERANCE[torch.float64]
ROTATED = 1e-6  # transformers computes the angles of rotary embeddings in fp32
ADDING = [name for name in EVERY if "sink" in name.split("+")]
OTHERS = {name: "+".join(part for part in name.split("+") if part != "sink") for name in ADDING}
TOKEN = 7


def cache_of_token(model: Any, rows: int) -> DynamicCache:
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.full((rows, 1), TOKEN), **with_cache(model, cache), use_cache=True)
    return cache


@torch.no_grad()
def write_token(model: Any, cache: DynamicCache) -> None:
    """The keys of the cached token, rotated to the place before the text, and its values, as the layers' pairs."""
    cos, sin = model.model.rotary_emb(torch.zeros(1, 1, 1, dtype=torch.float64), torch.tensor([[-1]]))
    for swap, layer in zip(swaps(model), cache.layers, strict=True):
        learned = swap.get_submodule("sink.learned")
        learned.key.copy_(apply_rotary_pos_emb(layer.keys, layer.keys, cos, sin)[0][0])
        learned.value.copy_(layer.values[0])


@pytest.mark.parametrize(("name", "padded"), turns(list(OTHERS), [False, True]))
def test_a_token_before_the_text(name: str, padded: bool) -> None:
    """With the pair of a token, a variant on a text is the variant without `sink` on the token and the text.

    The token itself is read by the stock model. Without another variant, this is the stock model on both.
    """
    stock = fresh("llama")
    batch = batch_of("llama", padded="left" if padded else None)
    ids = batch["input_ids"]
    mask = batch.get("attention_mask", torch.ones_like(ids))
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    cache = cache_of_token(stock, len(ids))
    options: dict[str, Any] = {"modern_hopfield": {"init": "first"}} if "modern_hopfield" in name else {}
    model = swap_in(fresh("llama"), name, **options)
    write_token(model, cache)
    with torch.no_grad():
        got = model(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        fewer = options.get("modern_hopfield", {}) if OTHERS[name] == "modern_hopfield" else options
        other = swap_in(stock, OTHERS[name], **fewer) if OTHERS[name] else stock
        longer = torch.cat([torch.ones_like(mask[:, :1]), mask], 1)
        given = {"input_ids": ids, "attention_mask": longer, "position_ids": positions + 1, **with_cache(other, cache)}
        wanted = other(**given, use_cache=True).logits
    real = mask.bool()
    assert distance(got[real], wanted[real]) <= ROTATED
    assert distance(got[real], fresh("llama")(**batch).logits.detach()[real]) > 1e-2, "the token matters"


@pytest.mark.parametrize(
    ("family", "kind", "strength"),
    [(family, *row) for family, row in turns(FAMILY_NAMES, [("key_value", 1.0), ("key", 0.3), ("score", 1.0)])],
)
def test_a_sink_of_zeros_is_softmax_1(family: str, kind: str, strength: float) -> None:
    batch = batch_of(family, padded=padding_side(family))
    wanted = run(patch_model(fresh(family), "outeffhop", strength=strength), batch)
    model = patch_model(fresh(family), "sink", kind=kind, strength=strength)
    assert_same(run(model, batch), wanted)


def test_a_row_that_sees_no_key_reads_the_pairs() -> None:
    model = perturb(patch_model(fresh("bert"), "sink", tokens=2))
    mask = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    mask[0, :, 2] = False
    seen: list[Any] = []
    swap = swaps(model)[0]
    swap.register_forward_hook(lambda module, args, output: seen.append((args[0], output[0])))
    forward(model, batch_of("bert") | {"attention_mask": mask})
    (inputs, heads), learned = seen[0], swap.get_submodule("sink.learned")
    scores = torch.einsum("hd,hnd->hn", inputs.query[0, :, 2], learned.key) * inputs.scaling
    assert (
        distance(heads[0, 2].detach(), torch.einsum("hn,hnd->hd", scores.softmax(-1), learned.value).detach()) <= EXACT
    )


KINDS: list[dict[str, Any]] = [{}, {"tokens": 3}, {"kind": "key", "tokens": 2}, {"kind": "score"}]
WAYS = [("bert", 1.0, ""), ("llama", 0.3, "+outeffhop"), ("llama", 1.0, ""), ("bert", 0.3, "+outeffhop")]


@pytest.mark.parametrize(
    ("options", "family", "strength", "other"), [(kind, *way) for kind, way in turns(KINDS, WAYS, 2)], ids=str
)
def test_joined_equals_further_keys(
    family: str, options: dict[str, Any], strength: float, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SDPA and one product, without a copy of the keys, is SDPA over all keys, in values and gradients."""
    given = {"sink": options} if other else options
    model = perturb(patch_model(fresh(family), "sink" + other, strength=strength, **given))
    batch = batch_of(family, padded=padding_side(family))
    assert {row.runs for row in describe(model).rows} == {Form.JOINED.value}
    joined = run_all(model, batch)
    monkeypatch.setattr(kernel, "softmax_n_attention", lambda *args, **kwargs: None)
    with Recorder() as seen:
        copied = run_all(model, batch)
    assert seen.count("scaled_dot_product_attention") == model.config.num_hidden_layers
    assert_same(joined, copied)


def test_no_copy_of_keys_or_mask_while_decoding() -> None:
    """Neither a key nor a mask gets one place more: a copy of the cache for each token would cost as much as it."""
    model = perturb(patch_model(fresh("llama", torch.float32, max_position_embeddings=300), "sink"))
    ids = zoo.inputs("llama", batch=1, length=200)["input_ids"]
    with torch.no_grad():
        cache = DynamicCache()
        model(input_ids=ids[:, :-1], **with_cache(model, cache), use_cache=True)
        with Recorder() as seen:
            model(input_ids=ids[:, -1:], **with_cache(model, cache), use_cache=True)
    assert any(200 in shape for shape in seen.shapes)
    assert not [shape for shape in seen.shapes if 201 in shape]


def test_layers_that_carry_scores_have_the_same_pairs() -> None:
    model = fresh("llama")
    patch_model(model, "modern_hopfield", layers=[0])
    with refused("carries scores between layers with", "[0, 1]", "layers="):
        patch_model(model, "sink+modern_hopfield", layers=[1, 2])
    patch_model(model, "sink+modern_hopfield", sink={"tokens": 2}, layers=[0, 1, 2])
    with refused("the same number of further keys", "[1, 2]"):
        patch_model(model, "sink+modern_hopfield", layers=[1])
    forward(model, batch_of("llama"))


def test_options() -> None:
    with refused("tokens must be at least 1"):
        patch_model(fresh("bert"), "sink", tokens=0)
    with refused("kind='score'", "tokens must be 1, got 2", "kind='key'"):
        patch_model(fresh("bert"), "sink", tokens=2, kind="score")


def test_several_pairs_start_apart() -> None:
    """Equal pairs would have equal gradients, and stay equal."""
    model = patch_model(fresh("bert"), "sink", tokens=3)
    _, gradients = run_all(model, batch_of("bert"))
    (first, *_) = [gradient for name, gradient in gradients.items() if name.endswith("sink.learned.key")]
    own: list[Tensor] = list(first.unbind(1))
    assert all(not torch.allclose(one, other) for one, other in itertools.pairwise(own))
