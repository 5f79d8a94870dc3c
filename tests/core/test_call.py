"""What one call holds: carried scores, the values of its own tokens, the strength, and heads in another order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_attn_swap.core.call import Call, Hidden
from tests.contract.harness import refused

BATCH, HEADS, GROUPS, QUERIES, KEYS, WIDTH = 2, 6, 3, 6, 9, 2  # as many queries as heads: axes must not be mixed up


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def call(queries: int = QUERIES, keys: int = KEYS, **more: Any) -> Call:
    return Call(x=drawn(BATCH, queries, HEADS * WIDTH), value=drawn(BATCH, GROUPS, keys, WIDTH, seed=1), **more)


def test_carried_scores_as_finite_numbers() -> None:
    scores = drawn(BATCH, HEADS, QUERIES, KEYS)
    blocked = scores > 0.5
    held = scores.masked_fill(blocked, -torch.inf)
    plain = Hidden(held, blocked=blocked).plain()
    assert plain.isfinite().all()
    assert torch.equal(plain[~blocked], scores[~blocked])
    assert Hidden(scores).plain() is scores
    terms = [(drawn(1, 2, 3, WIDTH, seed=s), drawn(1, 2, 5, WIDTH, seed=s + 1), w) for s, w in ((2, 0.5), (4, -1.5))]
    products = Hidden(None, terms=terms)
    wanted = 0.5 * terms[0][0] @ terms[0][1].mT - 1.5 * terms[1][0] @ terms[1][1].mT
    torch.testing.assert_close(products.plain(), wanted)
    assert products.shape == (1, 2, 3, 5)
    assert Hidden(scores).shape == tuple(scores.shape)


def test_a_copy_of_carried_scores() -> None:
    first = Hidden(drawn(1, 1, 2, 2), blocked=torch.zeros(1, 1, 2, 2, dtype=torch.bool))
    other = first.clone()
    assert first.scores is not None
    assert other.scores is not None
    other.scores += 1
    assert not torch.equal(first.scores, other.scores)
    assert other.blocked is first.blocked
    assert Hidden(None).clone().scores is None


@pytest.mark.parametrize(
    ("start", "keys", "first"),
    [
        (None, QUERIES, 0),
        (3, QUERIES, 0),  # a cache that gave the keys of these tokens alone
        (2, KEYS, 2),
        (KEYS, KEYS, KEYS - QUERIES),
        (torch.tensor(2), KEYS, 2),
        (torch.tensor(KEYS), KEYS, KEYS - QUERIES),
    ],
)
def test_values_of_the_own_tokens(start: Any, keys: int, first: int) -> None:
    own = call(keys=keys, start=start)
    assert own.value is not None
    wanted = own.value[:, :, first : first + QUERIES].transpose(1, 2)
    assert torch.equal(own.own_values(GROUPS), wanted)
    assert torch.equal(own.own_values(HEADS), wanted.repeat_interleave(2, 2))


def test_own_tokens_that_cannot_be_found() -> None:
    with refused(f"{QUERIES} tokens attend to {KEYS} keys", "use_cache=False"):
        call().own_values(HEADS)


def test_strength_in_a_dtype() -> None:
    full, between = call(), call(exact_strength=torch.tensor([0.3]))
    assert (full.strength_in(torch.float16), full.between, between.between) == (1.0, False, True)
    half = between.strength_in(torch.float16)
    assert isinstance(half, Tensor)
    assert half.dtype == torch.float16
