"""The states that stand in a cache for keys and values: what linear attention and a window have in common."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from benchmarks.bench_caches import cache_of, with_cache
from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.wiring.cache import LinearState
from hf_attn_swap.wiring.state import CROPPED, State
from hf_attn_swap.wiring.window_cache import WindowState
from tests import zoo

from .cells import LINEAR
from .harness import TOLERANCE, distance, fresh, perturb, refused

EXACT = TOLERANCE[torch.float64]
WINDOW = {"window": 5, "sinks": 2}
# By name: the variant, its options, its state, and the length of a prompt.
STATES: dict[str, tuple[str, dict[str, Any], type[State], int]] = {
    "linear": (LINEAR[0], {}, LinearState, 100),
    "window": ("window", WINDOW, WindowState, 4),
    "window, one head whole": ("window", {**WINDOW, "full_heads": (1,)}, WindowState, 150),
}
kinds = pytest.mark.parametrize("kind", STATES)


def model_of(kind: str, family: str = "llama") -> Any:
    lengths = {"gpt2": "n_positions"}
    model = fresh(family, **{lengths.get(family, "max_position_embeddings"): 300})
    model.generation_config.eos_token_id = None
    return perturb(patch_model(model, STATES[kind][0], **STATES[kind][1]))


def has_states(kind: str, cache: Any) -> bool:
    return any(isinstance(layer, STATES[kind][2]) for layer in cache.layers)


def ids_of(length: int, rows: int = 2) -> Tensor:
    return zoo.inputs("llama", batch=rows, length=length)["input_ids"]


def square(length: int) -> Tensor:
    """A mask of queries and keys."""
    return torch.ones(length, length, dtype=torch.bool).tril().expand(2, 1, -1, -1)


CHANGES: dict[str, tuple[Any, list[int]]] = {
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), [1]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), [0, 0, 1, 1]),
    "beams": (lambda cache: cache.reorder_cache(torch.tensor([1, 0])), [1, 0]),
    "copy": (copy.deepcopy, [0, 1]),
    "pickle": (lambda cache: pickle.loads(pickle.dumps(cache)), [0, 1]),
}


@kinds
@pytest.mark.parametrize("length", [3, 2 * CROPPED + 20])
@torch.no_grad()
def test_rows_are_selected_repeated_and_copied(kind: str, length: int) -> None:
    """And a token can be taken back afterwards."""
    model, ids = model_of(kind), ids_of(length + 1)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    places = (mask.cumsum(-1) - 1).clamp_min(0)
    first = {"input_ids": ids[:, :-1], "attention_mask": mask[:, :-1], "position_ids": places[:, :-1]}
    before = cache_of(model(**first, use_cache=True))
    wanted = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, -1:]
    for change, (act, rows) in CHANGES.items():
        cache = copy.deepcopy(before)
        cache = act(cache) or cache
        last = {"input_ids": ids[rows, -1:], "attention_mask": mask[rows], "position_ids": places[rows, -1:]}
        for _ in range(2):
            got = model(**last, **with_cache(model, cache)).logits
            assert distance(got, wanted[rows]) <= EXACT, change
            cache.crop(-1)


@kinds
@torch.no_grad()
def test_a_cache_is_reset(kind: str) -> None:
    """The next text may also ask for single keys: then the states give their places up."""
    model, ids = model_of(kind), ids_of(9)
    wanted = model(ids, use_cache=False).logits
    for mask in (None, square(9)):
        cache = cache_of(model(ids_of(250), use_cache=True))
        cache.reset()
        assert distance(model(ids, attention_mask=mask, **with_cache(model, cache)).logits, wanted) <= EXACT
        assert has_states(kind, cache) == (mask is None)


@kinds
@pytest.mark.parametrize(
    "change",
    [
        unpatch_model,
        lambda model: set_strength(model, 0.5),
        lambda model: set_strength(model, 0),
        lambda model: patch_model(model, "outeffhop"),
    ],
)
@torch.no_grad()
def test_a_state_read_by_other_attention_is_refused(kind: str, change: Any) -> None:
    model, ids = model_of(kind, "gpt2"), ids_of(9)
    cache = cache_of(model(ids[:, :-1], use_cache=True))
    change(model)
    with refused(STATES[kind][2].holds, "start a new cache"):
        model(ids[:, -1:], **with_cache(model, cache))


@kinds
def test_what_keeps_all_keys(kind: str) -> None:
    """Masks of queries and keys and weights from the first token on, gradients, and a strength below 1."""
    model, ids = model_of(kind), ids_of(9)
    assert not has_states(kind, cache_of(model(ids, use_cache=True)))
    with torch.no_grad():
        assert has_states(kind, cache_of(model(ids, use_cache=True)))
        for asked in ({"attention_mask": square(9)}, {"output_attentions": True}):
            assert not has_states(kind, cache_of(model(ids, **asked, use_cache=True)))
        assert not has_states(kind, cache_of(set_strength(model, 0.5)(ids, use_cache=True)))


@kinds
@torch.no_grad()
def test_what_a_state_cannot_give(kind: str) -> None:
    """Single keys, their weights, and earlier tokens that a later mask hides or shows."""
    model, ids = model_of(kind), ids_of(9)
    mask = torch.ones_like(ids)
    cache = cache_of(model(ids[:, :6], attention_mask=mask[:, :6], use_cache=True))

    def read(cache: Any, **asked: Any) -> Tensor:
        return model(ids[:, 6:], **asked, **with_cache(model, copy.deepcopy(cache))).logits

    for asked in ({"attention_mask": square(9)[:, :, 6:]}, {"output_attentions": True}):
        with refused("keys to show"):
            read(cache, **asked)
    hidden, left = mask.clone(), mask.clone()
    hidden[:, 1:3], left[0, :2] = 0, 0
    padded = cache_of(model(ids[:, :6], attention_mask=left[:, :6], use_cache=True))
    for held, later in ((cache, hidden), (cache, left), (padded, mask), (padded, None)):
        with refused("hides or shows other earlier tokens"):
            read(held, attention_mask=later)
    assert distance(read(cache, attention_mask=mask), model(ids, use_cache=False).logits[:, 6:]) <= EXACT
    whole = model(ids, attention_mask=left, use_cache=False).logits[:, 6:]
    assert distance(read(padded, attention_mask=left), whole) <= EXACT


@kinds
@torch.no_grad()
def test_a_plain_dynamic_cache_keeps_its_layers(kind: str) -> None:
    """Without a config it does not know its layers, so it stays what the user made."""
    model, ids, cache = model_of(kind), ids_of(9), DynamicCache()
    model(ids[:, :-1], **with_cache(model, cache))
    got = model(ids[:, -1:], **with_cache(model, cache)).logits
    assert distance(got, model(ids, use_cache=False).logits[:, -1:]) <= EXACT
    assert not has_states(kind, cache)


@kinds
@pytest.mark.parametrize(
    "asked",
    [
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True},
        {"do_sample": True, "num_return_sequences": 3},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=["beams", "beam-samples", "samples", "lookup"],
)
def test_ways_to_generate(kind: str, asked: dict[str, Any]) -> None:
    model, rows = model_of(kind), 1 if "prompt_lookup_num_tokens" in asked else 2
    model.generation_config.eos_token_id = model.config.vocab_size - 1  # some versions of transformers need an end
    ids = ids_of(7, rows).repeat(1, 30)[:, : STATES[kind][3]]  # a text that comes back
    prompt = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12}
    generated = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        plain = {name: value for name, value in asked.items() if use_cache or name != "prompt_lookup_num_tokens"}
        generated.append(model.generate(**prompt, use_cache=use_cache, **{"do_sample": False, **plain}))
    assert torch.equal(generated[0][:, : generated[1].shape[1]], generated[1])
