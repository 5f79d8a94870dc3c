"""`absorb_sink`: the model on a text is the stock model on the tokens and the text; what cannot be so is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import absorb, absorb_sink
from tests.contract.harness import distance, fresh, refused, swaps

ROTATED = 1e-6  # transformers computes the angles of rotary embeddings in fp32
TEXTS = ["the first text", "a second one, longer"]


class Letters:
    """A tokenizer whose tokens are letters."""

    all_special_ids = (0, 1)

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[ord(letter) % 60 + 3 for letter in text])

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{each}>" for each in ids)


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids, use_cache=False).logits
    return found


@pytest.mark.parametrize("family", ["llama"])
@pytest.mark.parametrize("count", [1, 3])
def test_the_stock_model_on_the_tokens_and_the_text(family: str, count: int) -> None:
    model = patch_model(fresh(family), "sink", tokens=count)
    found = absorb_sink(model, Letters(), TEXTS)
    assert len(found.tokens) == len(found.words) == count
    text = torch.tensor([Letters()("another text").input_ids])
    both = torch.cat([torch.tensor([found.tokens]), text], 1)
    wanted = logits(fresh(family), both)[:, count:]
    assert distance(logits(model, text), wanted) <= ROTATED
    assert distance(logits(fresh(family), text), wanted) > 1e-2
    assert all(swap.phase == "full" for swap in swaps(model))


def test_the_best_candidate_is_taken_and_told() -> None:
    model = patch_model(fresh("llama"), "sink")
    found = absorb_sink(model, Letters(), TEXTS)
    alone = {}
    for token in absorb._candidates(Letters(), [torch.tensor([Letters()(text).input_ids]) for text in TEXTS]):
        alone[token] = absorb_sink(model, Letters(), TEXTS, tokens=[token])
    assert len(alone) > 4
    assert min(max(each.after) for each in alone.values()) == pytest.approx(max(found.after))
    assert alone[found.tokens[0]] == found
    assert found.words[0] in str(found)
    assert len(found.before) == len(found.after) == model.config.num_hidden_layers - 1


def test_a_composition_gets_the_same_pairs() -> None:
    pairs = []
    for name in ("sink", "sink+belief"):
        model = patch_model(fresh("llama"), name)
        absorb_sink(model, Letters(), TEXTS, tokens=[7])
        pairs.append([parameter.detach() for swap in swaps(model) for parameter in swap.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*pairs, strict=True))


def test_massive_tokens_are_counted() -> None:
    """One token of the text writes a thousand times the median."""
    model = patch_model(fresh("llama"), "sink")
    with torch.no_grad():
        model.model.embed_tokens.weight[Letters()("x").input_ids[0], 5] = 1e5
    found = absorb_sink(model, Letters(), ["axbb", "bb"], tokens=[3])
    assert found.massive == (1, 1)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_learned_positions_are_refused(family: str) -> None:
    model = patch_model(fresh(family), "sink")
    with refused("positions do not count relatively"):
        absorb_sink(model, Letters(), TEXTS)
    assert not any(parameter.any() for swap in swaps(model) for parameter in swap.parameters())


@pytest.mark.parametrize(
    ("family", "variant", "given", "reason"),
    [
        ("bert", "sink", {}, "causal language model"),
        ("llama", "outeffhop", {}, "3 of 3 attention layers have no sink"),
        ("llama", "sink", {"kind": "score"}, "3 of 3 attention layers have no sink"),
        ("llama", "sink", {"layers": [0, 2]}, "1 of 3 attention layers have no sink"),
    ],
)
def test_other_swaps_are_refused(family: str, variant: str, given: dict[str, Any], reason: str) -> None:
    model = patch_model(fresh(family), variant, **given)
    with refused(reason):
        absorb_sink(model, Letters(), TEXTS)


def test_wrong_arguments() -> None:
    model = patch_model(fresh("llama"), "sink", tokens=2)
    with refused("the swaps have 2 pairs and 1 tokens were given"):
        absorb_sink(model, Letters(), TEXTS, tokens=[3])
    with refused("no text of two tokens or more"):
        absorb_sink(model, Letters(), ["a"])
