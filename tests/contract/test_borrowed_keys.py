"""Models whose upper layers take keys and values from lower layers, and may be given the last tokens alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from benchmarks.bench_caches import cache_of, with_cache
from hf_attn_swap import patch_model
from hf_attn_swap.families import sites
from hf_attn_swap.families.source import slices_unmasked
from hf_attn_swap.layer.swap import Swap

from .borrowing import IDS, NAMES, build
from .cells import COVERING

VARIANTS = [name for name, _ in COVERING]


def logits(model: Any, ids: Tensor = IDS, **arguments: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=ids, **arguments).logits


def borrowing(model: Any) -> list[bool]:
    return [site.borrows for site in sites(model)]


@pytest.fixture(scope="module", params=NAMES)
def stock(request: Any) -> Any:
    return build(request.param)


def swapped(stock: Any, variant: str, strength: float) -> Any:
    """All layers, or the last two if the variant carries scores and the model drops tokens before them."""
    model = copy.deepcopy(stock)
    try:
        return patch_model(model, variant, strength=strength)
    except ValueError as problem:
        assert "may drop tokens (logits_to_keep)" in str(problem)  # noqa: PT017  # some models are right in full
        assert any(slices_unmasked(type(module)) for module in model.modules())
        return patch_model(model, variant, strength=strength, layers=[2, 3])


def test_they_are_found(stock: Any) -> None:
    assert borrowing(stock) == [False, False, True, True]


@pytest.mark.parametrize(("variant", "strength"), [(VARIANTS[0], 0.0), *((name, 1.0) for name in VARIANTS)])
def test_the_last_tokens_alone(stock: Any, variant: str, strength: float) -> None:
    model = swapped(stock, variant, strength)
    wanted = logits(model, use_cache=False)
    if strength == 0:
        assert torch.allclose(wanted, logits(stock, use_cache=False), rtol=0, atol=1e-12)
    for keep in (1, 3):
        for cached in (False, True):
            got = logits(model, use_cache=cached, logits_to_keep=keep)
            assert torch.allclose(got, wanted[:, -keep:], rtol=0, atol=1e-12), (keep, cached)


@pytest.mark.parametrize("variant", VARIANTS)
def test_token_by_token(stock: Any, variant: str) -> None:
    """Keys that are lent are whole: no state of linear attention stands in their place."""
    model = swapped(stock, variant, 1.0)
    wanted = logits(model, use_cache=False)
    mask = torch.ones_like(IDS)
    mask[0, :2] = 0
    for given in ({}, {"attention_mask": mask}):
        whole = logits(model, use_cache=False, **given)
        with torch.no_grad():
            out = model(IDS[:, :5], use_cache=True, **{key: value[:, :5] for key, value in given.items()})
            parts, cache = [out.logits], cache_of(out)
            for end in range(6, 10):
                now = {key: value[:, :end] for key, value in given.items()}
                out = model(IDS[:, end - 1 : end], use_cache=True, **with_cache(model, cache), **now)
                parts.append(out.logits)
        shown = mask.bool() if given else torch.ones_like(IDS).bool()
        assert torch.allclose(torch.cat(parts, 1)[shown], whole[shown], rtol=0, atol=1e-12)
        assert given or torch.equal(whole, wanted)


@pytest.mark.parametrize("strength", [0.0, 1.0])
@pytest.mark.parametrize("keep", [1, 3])
def test_a_static_cache(stock: Any, keep: int, strength: float) -> None:
    """Right at strength 0. A swap cannot tell how many keys of the other layer are there, and says so."""
    model = patch_model(copy.deepcopy(stock), "belief", strength=strength)
    wanted = logits(stock, use_cache=False)
    arguments = with_cache(model, StaticCache(config=model.config, max_cache_len=32))
    if strength:
        with pytest.raises(ValueError, match=r"takes its keys from another layer.*use a DynamicCache"):
            logits(model, IDS[:, :8], logits_to_keep=keep, **arguments)
        return
    got = logits(model, IDS[:, :8], logits_to_keep=keep, **arguments)
    assert torch.allclose(got, wanted[:, 8 - keep : 8], rtol=0, atol=1e-12)
    assert torch.allclose(logits(model, IDS[:, 8:], **arguments), wanted[:, 8:], rtol=0, atol=1e-12)


def test_scores_carried_past_dropped_tokens_are_refused(stock: Any) -> None:
    drops = any(slices_unmasked(type(module)) for module in stock.modules())
    model = swapped(stock, "modern_hopfield", 1.0)
    assert sum(isinstance(module, Swap) for module in model.modules()) == (2 if drops else 4)
