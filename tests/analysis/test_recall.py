"""What a model recalls, against a plain loop; which passages and distances are taken; what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.layer.registry import tiny_options
from hf_attn_swap.measuring.held_out import HeldOut
from hf_attn_swap.measuring.lost import Lost
from hf_attn_swap.measuring.recall import SKIPPED, Passages, recall
from tests.contract.harness import fresh, refused

LENGTH, DISTANCE = 16, 20


def stock(name: str = "llama", **config: Any) -> Any:
    return fresh(name, torch.float64, **{"max_position_embeddings": 128, **config})


def rows(count: int = 6, length: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(4, 64, (count, length), generator=generator).tolist()


def by_a_loop(model: Any, stream: list[int], place: int, length: int, distance: int) -> float:
    """Passage, other text, passage: one token after another."""
    around = stream[place:] + stream[:place]
    passage, rest = around[:length], around[length:]
    start = (len(rest) - distance) // 2
    text = passage + rest[start : start + distance] + passage
    total = 0.0
    with torch.no_grad():
        for token in range(SKIPPED, length):
            for sign, before in ((-1, token), (1, length + distance + token)):
                logits = model(input_ids=torch.tensor([text[:before]])).logits[0, -1]
                total += sign * float(logits.log_softmax(-1)[text[before]])
    return total / (length - SKIPPED)


@pytest.mark.parametrize(("name", "variant"), [("llama", "window"), ("gpt2", None), ("opt", "simpletron_resl")])
def test_against_a_plain_loop(name: str, variant: str | None) -> None:
    model = stock(name)
    if variant is not None:
        patch_model(model, variant, **tiny_options(variant))
    given = rows()
    recalled = recall(model, given, distances=(DISTANCE, 40), passages=3, length=LENGTH)
    stream = list(chain(*given))
    assert list(recalled.gains) == [DISTANCE, 40]
    for distance, gains in recalled.gains.items():
        wanted = [by_a_loop(model.eval(), stream, place, LENGTH, distance) for place in (0, 48, 96)]
        assert gains == pytest.approx(wanted, abs=1e-5)
        assert all(abs(gain) > 1e-4 for gain in gains)


def test_rows_of_every_kind_are_the_same_text() -> None:
    model, given = stock(), rows()
    tensor = torch.tensor(given)
    padded = torch.cat([tensor, torch.zeros(6, 5, dtype=torch.long)], 1)
    mask = torch.ones_like(padded)
    mask[:, 24:] = 0
    texts = [
        Passages.of(model, each, (DISTANCE,), length=LENGTH).texts[DISTANCE]
        for each in (
            given,
            tensor,
            list(tensor),
            [{"input_ids": row} for row in given],
            {"input_ids": tensor},
            [{"input_ids": padded, "attention_mask": mask}],
        )
    ]
    assert all(torch.equal(one, other) for one, other in pairwise(texts))
    assert texts[0].shape == (8, 2 * LENGTH + DISTANCE)


def test_distances_that_do_not_fit_are_left_out() -> None:
    distances = (DISTANCE, 128, 129)
    bounded = stock(max_position_embeddings=96)
    assert list(recall(bounded, rows(), distances=(64, 65), length=LENGTH).gains) == [64]  # 2 * 16 + 64
    assert list(recall(stock(max_position_embeddings=512), rows(), distances=distances, length=LENGTH).gains) == [
        DISTANCE,
        128,  # 6 * 24 = 16 + 128
    ]


def test_refusals() -> None:
    model = stock()
    with refused("recall is measured by the next token; BertForMaskedLM is no causal language model."):
        recall(fresh("bert"), rows())
    with refused("do not fit: the rows have 144 tokens together, and the model has 128 positions"):
        recall(model, rows())
    with refused("there are no rows"):
        recall(model, [])
    for row in ("a text", {"labels": [1]}, [0.5, 1.5], None):
        with refused("a row is token ids, or a dict with input_ids, got"):
            recall(model, [row])
    for more in ({"passages": 0}, {"length": SKIPPED}, {"distances": (0, 64)}, {"distances": ()}):
        with refused("recall takes at least one passage of more than 9 tokens"):
            recall(model, rows(), **more)


def test_held_out_rows_measure_recall() -> None:
    model, given = stock(), rows()
    passages = Passages.of(model, given, (DISTANCE,), length=LENGTH)
    own = passages.measure(model).mean(DISTANCE)
    held = HeldOut(model, {"input_ids": torch.tensor(given)}, passages=passages, progress=False)
    patch_model(model, "window", window=4, sinks=1)
    for each in (held, held.subset(1)):
        loss = each.lost(model)
        assert loss.recall == passages.measure(model).mean(DISTANCE) != own
        assert (loss.stock_recall, loss.recall_distance) == (own, DISTANCE)
    assert held.baseline().recall == own
    late = HeldOut(model, {"input_ids": torch.tensor(given)}, passages=passages, progress=False)
    assert late.stock_recall == own, "a patched model counts at strength 0"
    assert f"Recall after {DISTANCE} tokens, nats per token (the stock model's): " in str(loss)


def test_a_budget_for_recall() -> None:
    lost = Lost(tokens=1, divergence=0.1, perplexity=11.0, stock_perplexity=10.0, recall=1.9, stock_recall=2.0)
    assert lost.recall_share == pytest.approx(0.95)
    assert lost.within(0.11, 0.94)
    assert not lost.within(0.09, 0.94)
    assert not lost.within(0.11, 0.96)
    assert lost.within(None, None)
    assert not replace(lost, stock_recall=-1.0).within(None, 0.9), "a share of nothing is no share"
    assert not replace(lost, recall=None).within(None, 0.9)
    assert replace(lost, recall=None).recall_share is None
