"""A window: exact on texts that fit into it, cached as uncached at every boundary, and a cache of constant size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import DynamicCache

from benchmarks.bench_caches import cache_of, with_cache
from hf_attn_swap import describe, patch_model, set_strength
from hf_attn_swap.kernels import windows
from hf_attn_swap.wiring.state import CROPPED
from hf_attn_swap.wiring.window_cache import WindowState
from tests import zoo
from tests.harness.places import turns

from .cells import EVERY, FAMILY_NAMES, swap_in
from .harness import (
    CAUSAL_FAMILIES,
    LENGTH,
    TOLERANCE,
    assert_identical,
    batch_of,
    distance,
    forward,
    fresh,
    padding_side,
    perturb,
    refused,
    run,
)  # fmt: skip

EXACT = TOLERANCE[torch.float64]
POSITIONS = {"gpt2": "n_positions"}
LIMITED = [name for name in EVERY if "window" in name.split("+")]
W, S = 5, 2  # the window and the first tokens of these tests
HEADS = [(), (1,)]  # the key/value heads that keep all keys


def model_of(family: str, variant: str = "window", length: int = 64, layers: Any = None, **more: Any) -> Any:
    options = {"window": W, "sinks": S, **more}
    given = options if variant == "window" else {"window": options}
    model = fresh(family, **{POSITIONS.get(family, "max_position_embeddings"): length})
    model = perturb(swap_in(model, variant, layers=layers, **given))
    if family in CAUSAL_FAMILIES:
        model.generation_config.eos_token_id = None
    return model


def states(cache: Any) -> list[WindowState]:
    assert all(isinstance(layer, WindowState) for layer in cache.layers)
    return list(cache.layers)


def padded(ids: Tensor, left: int) -> dict[str, Tensor]:
    """A mask that hides the first tokens of row 0, and the positions that go with it."""
    mask = torch.ones_like(ids)
    mask[0, :left] = 0
    return {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_text_that_fits_is_stock_bit_for_bit(family: str, dtype: torch.dtype) -> None:
    """With and without padding, values and gradients; one key less, and the outputs differ."""
    stock = fresh(family, dtype)
    tokens = 5 if family == "vit" else LENGTH
    for side in {None, padding_side(family)}:
        batch = batch_of(family, dtype, side)
        model = patch_model(fresh(family, dtype), "window", window=tokens, sinks=0)
        for strength in (1.0, 0.5):
            assert_identical(run(set_strength(model, strength), batch), run(stock, batch))
        model = patch_model(fresh(family, dtype), "window", window=tokens - 1, sinks=0)
        assert not torch.equal(forward(model, batch), forward(stock, batch))


@pytest.mark.parametrize(
    ("family", "left", "full"), [("llama", 0, ()), ("llama", S, (1,)), ("gpt2", 1, (1,)), ("opt", W + 3, ())]
)
@torch.no_grad()
def test_cached_equals_uncached_at_every_boundary(family: str, left: int, full: tuple[int, ...]) -> None:
    """Every length of the first call around the window, then tokens one by one."""
    model, total = model_of(family, full_heads=full), 2 * W + S + 6
    ids = zoo.inputs(family, batch=2, length=total)["input_ids"]
    given = padded(ids, left)
    real = given["attention_mask"].bool()
    wanted = model(input_ids=ids, **given, use_cache=False).logits
    for prompt in (1, S, W - 1, W, W + 1, W + S + 1, total - 1):
        cache, got = DynamicCache(config=model.config), []
        for start, stop in [(0, prompt), *((place, place + 1) for place in range(prompt, total))]:
            part = {
                "attention_mask": given["attention_mask"][:, :stop],
                "position_ids": given["position_ids"][:, start:stop],
            }
            got.append(model(input_ids=ids[:, start:stop], **part, **with_cache(model, cache)).logits)
        assert distance(torch.cat(got, 1)[real], wanted[real]) <= EXACT, prompt
    states(cache)


@pytest.mark.parametrize(
    ("left", "full", "variant"),
    [(*row, name) for row, name in turns([(n, full) for n in (0, 3, 2 * CROPPED + 8) for full in HEADS], LIMITED)],
)
@torch.no_grad()
def test_calls_of_any_size(left: int, full: tuple[int, ...], variant: str) -> None:
    """Several turns, longer than what the cache lets go at once, some of it before the first real token of a row."""
    total = 2 * CROPPED + 90
    model = model_of("llama", variant, length=total, full_heads=full)
    ids = zoo.inputs("llama", batch=2, length=total)["input_ids"]
    given = padded(ids, left)
    real = given["attention_mask"].bool()
    wanted = model(input_ids=ids, **given, use_cache=False).logits
    for sizes in ([70, 1, 80, 3, 64], [133, 2, 70, 13], [1, 2, 150, 65], [5, 140, 73], [total]):
        cache, got, start = DynamicCache(config=model.config), [], 0
        for size in sizes:
            stop = start + size
            part = {
                "attention_mask": given["attention_mask"][:, :stop],
                "position_ids": given["position_ids"][:, start:stop],
            }
            got.append(model(input_ids=ids[:, start:stop], **part, **with_cache(model, cache)).logits)
            start = stop
        assert distance(torch.cat(got, 1)[real[:, :start]], wanted[:, :start][real[:, :start]]) <= EXACT


@torch.no_grad()
def test_the_cache_does_not_grow() -> None:
    model = model_of("llama", length=600)
    ids = zoo.inputs("llama", batch=1, length=600)["input_ids"]
    cache, most = DynamicCache(config=model.config), W - 1 + 2 * CROPPED
    for start in range(0, 600, 3):
        model(input_ids=ids[:, start : start + 3], **with_cache(model, cache))
        for state in states(cache):
            key, value = state.last
            assert min(start + 3, W - 1 + CROPPED) <= key.shape[2] <= most
            assert key.untyped_storage().nbytes() <= most * key[:, :, 0].nbytes
            assert value.untyped_storage().nbytes() <= most * value[:, :, 0].nbytes
            assert state.get_seq_length() == start + 3
    assert cache.get_seq_length() == 600
    long = cache_of(model(input_ids=ids, use_cache=True))
    assert all(state.last[0].untyped_storage().nbytes() <= most * key[:, :, 0].nbytes for state in states(long))


@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("full", HEADS, ids=str)
@torch.no_grad()
def test_a_cropped_cache_is_that_of_the_shorter_text(padding: int, full: tuple[int, ...]) -> None:
    total = 3 * CROPPED
    model = model_of("llama", length=total + 8, full_heads=full)
    ids = zoo.inputs("llama", batch=2, length=total + 4)["input_ids"]
    given = padded(ids, padding)
    wanted = model(input_ids=ids, **given, use_cache=False).logits

    def extended(cache: Any, start: int, stop: int) -> Tensor:
        part = {
            "attention_mask": given["attention_mask"][:, :stop],
            "position_ids": given["position_ids"][:, start:stop],
        }
        return model(input_ids=ids[:, start:stop], **part, **with_cache(model, cache)).logits

    for length in (3, W, W + S, CROPPED, 2 * CROPPED + W, total):
        for removed in (1, 2, W, CROPPED):
            if removed >= length:
                continue
            cache = DynamicCache(config=model.config)
            extended(cache, 0, length)
            cache.crop(-removed)
            assert cache.get_seq_length() == length - removed
            got = extended(cache, length - removed, length + 4)
            shown = given["attention_mask"][:, length - removed : length + 4].bool()
            assert distance(got[shown], wanted[:, length - removed : length + 4][shown]) <= EXACT
    extended(cache := DynamicCache(config=model.config), 0, total)
    with refused("cannot go back 65 tokens;"):
        cache.crop(-CROPPED - 1)
    cache.crop(-total)
    assert cache.get_seq_length() == 0
    assert distance(extended(cache, 0, 9)[1], wanted[1, :9]) <= EXACT


@pytest.mark.parametrize("variant", LIMITED)
@torch.no_grad()
def test_which_layers_keep_the_keys_of_a_window(variant: str) -> None:
    """All of them, in a layer with any other variant too; but scores that are carried are those of all keys."""
    model = model_of("llama", variant)
    cache = cache_of(model(**zoo.inputs("llama"), use_cache=True))
    assert {isinstance(layer, WindowState) for layer in cache.layers} == {"modern_hopfield" not in variant}
    cache = cache_of(model_of("llama", variant, layers=[1])(**zoo.inputs("llama"), use_cache=True))
    assert [isinstance(layer, WindowState) for layer in cache.layers].count(True) == ("modern_hopfield" not in variant)
    cache = cache_of(model_of("llama", variant, full_heads=(0,))(**zoo.inputs("llama"), use_cache=True))
    whole = {"modern_hopfield", "sink"} & set(variant.split("+"))  # there every head must have the same rule
    assert {isinstance(layer, WindowState) for layer in cache.layers} == {not whole}


@pytest.mark.parametrize(("family", "strength"), [("bert", 0.5), ("llama", 1.0), ("llama", 0.5)])
def test_all_heads_with_all_keys_are_stock_bit_for_bit(family: str, strength: float) -> None:
    """With and without padding, values and gradients, and with the cache of the stock model."""
    stock = fresh(family, torch.float32)
    count = getattr(stock.config, "num_key_value_heads", None) or stock.config.num_attention_heads
    model = patch_model(fresh(family, torch.float32), "window", window=1, sinks=0, full_heads=range(count)[::-1])
    for side in {None, padding_side(family)}:
        batch = batch_of(family, torch.float32, side)
        assert_identical(run(set_strength(model, strength), batch), run(stock, batch))
    if family in CAUSAL_FAMILIES:
        with torch.no_grad():
            cache = cache_of(model(**batch, use_cache=True))
        assert not any(isinstance(layer, WindowState) for layer in cache.layers)


@torch.no_grad()
def test_each_layer_has_its_own_heads() -> None:
    """All keys of the heads that see them, the last keys of the others; and a layer without such heads."""
    model, length = model_of("llama", length=600), 500
    for layer, full in enumerate([(0,), (1,)]):
        patch_model(model, "window", layers=layer, window=W, sinks=S, full_heads=list(full))
    ids = zoo.inputs("llama", batch=1, length=length)["input_ids"]
    whole = model(ids, use_cache=False).logits
    cache = DynamicCache(config=model.config)
    got = [model(ids[:, :-20], **with_cache(model, cache)).logits]
    got += [model(ids[:, place : place + 1], **with_cache(model, cache)).logits for place in range(length - 20, length)]
    assert distance(torch.cat(got, 1), whole) <= EXACT
    kept = [None if state.whole is None else state.whole[0].shape[1:3] for state in states(cache)]
    assert kept == [(1, length), (1, length), None]
    assert [state.last[0].shape[1] for state in states(cache)] == [1, 1, 2]
    assert all(state.last[0].shape[2] <= W - 1 + 2 * CROPPED for state in states(cache))
    assert model.config.attn_swap["swaps"][0]["options"]["window"]["full_heads"] == [0]
    shown = [row.options["window"]["full_heads"] for row in describe(model).rows]
    assert shown == [[0], [1], []]


@pytest.mark.parametrize("options", [{"window": W + 1, "sinks": S}, {"window": W, "sinks": S, "full_heads": (0,)}])
@torch.no_grad()
def test_a_cache_of_another_window_is_refused(options: dict[str, Any]) -> None:
    model, ids = model_of("gpt2"), zoo.inputs("gpt2", batch=2, length=9)["input_ids"]
    cache = cache_of(model(ids[:, :-1], use_cache=True))
    patch_model(model, "window", **options)
    with refused("the keys and values", "start a new cache"):
        model(ids[:, -1:], **with_cache(model, cache))


SIZES = dict(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
SIZES |= dict(intermediate_size=16, sliding_window=4, pad_token_id=0, eos_token_id=None, bos_token_id=None)
SIZES |= dict(layer_types=["sliding_attention", "full_attention"])
SLIDING: dict[str, Any] = {  # Gemma 2 bounds its scores, so transformers gives it masks of numbers
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, use_sliding_window=True)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SIZES, head_dim=8)),
}


@pytest.mark.parametrize("name", SLIDING)
@torch.no_grad()
def test_a_layer_with_a_smaller_window_of_its_own_stays(name: str) -> None:
    """The model's own mask is a part of the window; the other layers keep the keys of a window, if masks allow it."""
    torch.manual_seed(0)
    stock = SLIDING[name]().double().eval()
    ids = torch.arange(20)[None] % 32
    model = patch_model(copy.deepcopy(stock), "window", window=4, sinks=0, layers=[0])
    assert distance(model(ids).logits, stock(ids).logits) <= 1e-6  # norms round to fp32
    model = patch_model(copy.deepcopy(stock), "window", window=6, sinks=1)
    assert not torch.equal(model(ids).logits, stock(ids).logits)
    wanted = model.generate(ids, use_cache=False, max_new_tokens=9, do_sample=False)
    for cache in (None, DynamicCache()):
        given = {} if cache is None else with_cache(model, cache)
        out = model.generate(ids, **given, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
        assert torch.equal(out.sequences, wanted)
        if cache is None:
            kept = [isinstance(layer, WindowState) for layer in cache_of(out).layers]
            assert kept == [False, name == "qwen2"]


def test_tokens_without_one_order_are_refused() -> None:
    config = transformers.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[2], num_heads=[2], window_size=4)
    with refused("SwinLayer cuts its tokens into windows", "window counts the places", "layers="):
        patch_model(transformers.SwinForImageClassification(config), "window")


def test_options() -> None:
    with refused("window must be at least 1"):
        patch_model(fresh("bert"), "window", window=0)
    with refused("sinks must be at least 0"):
        patch_model(fresh("bert"), "window", sinks=-1)
    for heads in (0, "0", [0.5], [True], {0}):
        with refused("window: option full_heads must"):
            patch_model(fresh("llama"), "window", full_heads=heads)
    with refused("full_heads are numbers of key/value heads"):
        patch_model(fresh("llama"), "window", full_heads=(0, -1))
    with refused("full_heads has [2], but this layer", "from 0 to 1"):
        patch_model(fresh("llama"), "window", full_heads=(0, 2))


@torch.no_grad()
def test_a_token_is_decoded_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a full window every key that is held for it is seen."""
    model, ids = model_of("llama"), zoo.inputs("llama", batch=1, length=20)["input_ids"]
    cache, found, next_token = DynamicCache(config=model.config), [], windows.next_token
    monkeypatch.setattr(windows, "next_token", lambda *given: found.append(next_token(*given)) or found[-1])
    model(ids[:, :-1], **with_cache(model, cache))
    model(ids[:, -1:], **with_cache(model, cache))
    layers = model.config.num_hidden_layers
    assert [inside is None for inside in found] == [True] * layers + [False] * layers
    assert found[-1].masks.dense() == (None, False)
