"""A decoder that is used as an encoder (`is_causal=False`) sees both directions, whatever the cache and the mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.bench_caches import cache_of, with_cache
from hf_attn_swap import patch_model
from tests import zoo

from .cells import WIDE, Cell, over_in_turn
from .harness import CAUSAL_FAMILIES, TOLERANCE, distance, forward, fresh, perturb, refused

LENGTH = 7


def model_of(family: str, variant: str, by_config: bool) -> tuple[Any, dict[str, Any]]:
    model = perturb(patch_model(fresh(family), variant))
    if not by_config:
        return model, {"is_causal": False}
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.is_causal = False
    return model, {}


def words_of(family: str, padded: str | None) -> dict[str, Tensor]:
    return zoo.inputs(family, length=LENGTH, padded=padded)


@over_in_turn(
    WIDE,
    ("padded", "by_config"),
    [(None, True), ("left", False), ("left", True), (None, False)],
    CAUSAL_FAMILIES,
)
def test_with_and_without_a_cache(family: str, cell: Cell, padded: str | None, by_config: bool) -> None:
    model, how = model_of(family, cell[0], by_config)
    words = words_of(family, padded)
    wanted = forward(model, words, use_cache=False, **how)
    assert distance(forward(model, words, use_cache=True, **how), wanted) <= TOLERANCE[torch.float64]
    later = {**words, "input_ids": words["input_ids"].clone()}
    later["input_ids"][:, -1] = 3
    moved = forward(model, later, use_cache=True, **how)
    assert distance(moved[:1], wanted[:1]) > 1e-9, "the first token does not see the last one"


@torch.no_grad()
@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_a_sum_of_tokens_cannot_be_read_in_both_directions(family: str) -> None:
    """A causal text went into a state; tokens that see each other in both directions are refused after it."""
    model, how = model_of(family, "simpletron_resl", by_config=False)
    ids = words_of(family, None)["input_ids"]
    cache = cache_of(model(input_ids=ids[:, :4], use_cache=True))
    with refused("is_causal=False", "from the first token on"):
        model(input_ids=ids[:, 4:], **with_cache(model, cache), **how)
