"""A cache is found in outputs and handed to models by its type, whatever transformers calls it."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from benchmarks.bench_caches import cache_of, with_cache
from tests import zoo
from tests.contract.harness import CAUSAL_FAMILIES, distance, refused


@pytest.mark.parametrize("family", CAUSAL_FAMILIES)
def test_a_text_in_two_calls(family: str) -> None:
    model, ids = zoo.build(family, torch.float64).eval(), zoo.inputs(family)["input_ids"]
    fresh = DynamicCache(config=model.config)
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        first = model(input_ids=ids[:, :4], **with_cache(model, fresh), use_cache=True)
        assert cache_of(first) is fresh
        rest = model(input_ids=ids[:, 4:], **with_cache(model, cache_of(first)))
    assert distance(torch.cat([first.logits, rest.logits], 1), wanted) <= 1e-12


@pytest.mark.parametrize("family", [name for name in zoo.SPECS if name not in zoo.UNSWAPPABLE])
def test_the_argument_exists(family: str) -> None:
    """A decoder has the argument, with any of its heads, and `generate` takes it by the same name."""
    model = zoo.build(family)
    if zoo.SPECS[family].kind not in ("causal", "seq2seq", "speech"):
        with refused(type(model).__name__, "reads no cache"):
            with_cache(model, None)
        return
    (name,) = with_cache(model, None)
    assert name in inspect.signature(model.forward).parameters


class Renamed(nn.Module):
    def forward(self, input_ids: Tensor, memory: Cache | list[Any] | None = None, other: Any = None) -> None:
        """Reads a cache by a name that no version of transformers has used."""


def test_another_name() -> None:
    cache = DynamicCache()
    assert with_cache(Renamed(), cache) == {"memory": cache}


def test_an_output_without_a_cache() -> None:
    with refused("BaseModelOutputWithPast has no cache, only last_hidden_state", "use_cache=True"):
        cache_of(BaseModelOutputWithPast(last_hidden_state=torch.zeros(1)))
