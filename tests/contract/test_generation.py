"""Generation with a cache equals generation without, token for token and in logits, for every variant."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import QuantizedLayer

from benchmarks.bench_caches import cache_of, with_cache
from tests.harness.generation import assert_equal_generation, model_of, prompt_of
from tests.harness.places import one_per_place

from .cells import COMPOSED, COVERING, OPTIONS, WIDE, Cell, FamilyCell, over, over_in_turn, shown
from .harness import CAUSAL_FAMILIES, TOLERANCE, distance

CACHES: list[dict[str, Any]] = [{}, {"cache_implementation": "static"}]
# What a cache must keep depends on the place that a variant changes, and not on its formula.
IN_LLAMA: tuple[FamilyCell, ...] = tuple(("llama", shown(name)) for name in one_per_place())
EVERYWHERE = IN_LLAMA + tuple((family, cell) for family in CAUSAL_FAMILIES if family != "llama" for cell in COVERING)


@over_in_turn(WIDE + COMPOSED, "padded", [None, "left"], CAUSAL_FAMILIES)
def test_dynamic_cache(family: str, cell: Cell, padded: str | None) -> None:
    assert_equal_generation(model_of(family, cell), prompt_of(family, padded), {})


@over_in_turn(EVERYWHERE, "padded", [None, "left"])
def test_static_cache(family: str, cell: Cell, padded: str | None) -> None:
    assert_equal_generation(model_of(family, cell), prompt_of(family, padded), {"cache_implementation": "static"})


class Kept(QuantizedLayer):
    """A backend that rounds nothing: everything else is as transformers quantises keys and values."""

    calls = 0

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        Kept.calls += 1
        return tensor.clone()

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class Away(DynamicCache):
    """Offloading without the streams of a GPU: a layer is elsewhere except while it is updated."""

    calls = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        Away.calls += 1
        self.layers[layer_idx].prefetch()
        given = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.layers[layer_idx].offload()
        return given


# Of the prompt's end and the new tokens, some are in the quantised part and some beside it.
OTHERS: dict[Any, Callable[[Any], Cache]] = {
    Kept: lambda model: Cache(layers=[Kept(residual_length=3) for _ in range(model.config.num_hidden_layers)]),
    Away: lambda model: Away(config=model.config),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize(("family", "variant"), list(zip(itertools.cycle(CAUSAL_FAMILIES), one_per_place())))
def test_quantised_and_offloaded_caches(family: str, variant: str, kind: Any) -> None:
    model = model_of(family, (variant, {}))
    before = kind.calls
    assert_equal_generation(model, prompt_of(family, "left"), with_cache(model, OTHERS[kind](model)))
    assert kind.calls - before > 2 * model.config.num_hidden_layers  # of keys and values: more than the prompt's


@pytest.mark.parametrize(("family", "variant"), list(zip(itertools.cycle(CAUSAL_FAMILIES), one_per_place())))
def test_beam_search(family: str, variant: str) -> None:
    """Beams are reordered in the cache; the row of a token's own value must move with it."""
    assert_equal_generation(model_of(family, (variant, {})), prompt_of(family, "left"), {}, num_beams=3)


@over_in_turn(OPTIONS, "cache", CACHES, ("llama",))
def test_options(family: str, cell: Cell, cache: dict[str, Any]) -> None:
    """A fixed length counts padding, and a static cache is longer than what it holds: plain prompts alone there."""
    padded = None if cell[1].get("length") == "fixed" else "left"
    assert_equal_generation(model_of(family, cell), prompt_of(family, padded), cache)


@over_in_turn(IN_LLAMA, "cache", CACHES)
def test_in_between(family: str, cell: Cell, cache: dict[str, Any]) -> None:
    assert_equal_generation(model_of(family, cell, strength=0.5), prompt_of(family, "left"), cache)


@over(EVERYWHERE)
def test_in_chunks(family: str, cell: Cell) -> None:
    """Several tokens at once onto a cache that holds some: the queries are the last rows."""
    model, prompt = model_of(family, cell), prompt_of(family)
    ids = prompt["input_ids"]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        first = model(input_ids=ids[:, :2], use_cache=True)
        cache = cache_of(first)
        second = model(input_ids=ids[:, 2:5], **with_cache(model, cache), use_cache=True)
        third = model(input_ids=ids[:, 5:], **with_cache(model, cache), use_cache=True)
    got = torch.cat([first.logits, second.logits, third.logits], 1)
    assert distance(got, wanted) <= TOLERANCE[torch.float64]
