"""Generation with a cache equals generation without, token for token and in logits, for every variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.bench_caches import cache_of, with_cache
from tests.harness.generation import NEW, PROMPT, assert_equal_generation, model_of, prompt_of

from .cells import COMPOSED, OPTIONS, WIDE, Cell, over, over_half
from .harness import CAUSAL_FAMILIES, TOLERANCE, distance


@over(WIDE + COMPOSED, CAUSAL_FAMILIES)
@pytest.mark.parametrize("padded", [None, "left"])
def test_dynamic_cache(family: str, cell: Cell, padded: str | None) -> None:
    assert_equal_generation(model_of(family, cell), prompt_of(family, padded), {})


@over_half(WIDE, CAUSAL_FAMILIES)
@pytest.mark.parametrize("padded", [None, "left"])
def test_static_cache(family: str, cell: Cell, padded: str | None) -> None:
    assert_equal_generation(model_of(family, cell), prompt_of(family, padded), {"cache_implementation": "static"})


@over_half(WIDE, CAUSAL_FAMILIES)
def test_beam_search(family: str, cell: Cell) -> None:
    """Beams are reordered in the cache; the row of a token's own value must move with it."""
    assert_equal_generation(model_of(family, cell), prompt_of(family, "left"), {}, num_beams=3)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@over(OPTIONS, ("llama",))
def test_options(family: str, cell: Cell, cache: dict[str, Any]) -> None:
    """A fixed length counts padding, and a static cache is longer than what it holds: plain prompts alone there."""
    padded = None if cell[1].get("length") == "fixed" else "left"
    assert_equal_generation(model_of(family, cell), prompt_of(family, padded), cache)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
@over(WIDE, ("gpt2",))
def test_in_between(family: str, cell: Cell, cache: dict[str, Any]) -> None:
    assert_equal_generation(model_of(family, cell, strength=0.5), prompt_of(family, "left"), cache)


@over_half(WIDE + COMPOSED, CAUSAL_FAMILIES)
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


@over(WIDE, ("gpt2",))
def test_sampling_is_reproducible_and_runs(family: str, cell: Cell) -> None:
    model, prompt = model_of(family, cell), prompt_of(family)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        drawn.append(model.generate(**prompt, max_new_tokens=NEW, do_sample=True, num_return_sequences=2))
    assert torch.equal(*drawn)
    assert drawn[0].shape == (4, PROMPT + NEW)
