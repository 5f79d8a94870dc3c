"""A cache is found in outputs and handed to models by its type, whatever transformers calls it."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from benchmarks.bench_caches import cache_of, with_cache
from tests import zoo
from tests.contract.harness import CAUSAL_FAMILIES, distance


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
