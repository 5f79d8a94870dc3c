"""The loss by position, against a plain loop; rows behind the positions of a model; rows longer than a conversion's."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.measuring.batches import check_length
from hf_attn_swap.measuring.held_out import HeldOut
from hf_attn_swap.measuring.lost import lost
from tests.contract.harness import fresh, refused

PLACES = {0: (1, 63), 1: (64, 127), 2: (128, 255)}


def stock(**config: Any) -> Any:
    return fresh("llama", torch.float64, **{"max_position_embeddings": 256, **config})


def batches() -> list[dict[str, Any]]:
    """Rows of 130 tokens, and of 70 with padding in front or behind."""
    generator = torch.Generator().manual_seed(3)
    whole, part = (torch.randint(4, 64, (2, 130), generator=generator) for _ in range(2))
    mask = torch.ones_like(part)
    mask[0, :60], mask[1, 70:] = 0, 0
    return [{"input_ids": whole}, {"input_ids": part, "attention_mask": mask}]


def by_a_loop(model: Any, given: list[dict[str, Any]]) -> dict[int, list[float]]:
    """The loss of every token behind the first of its row, by the bin that it belongs to."""
    result = defaultdict(list)
    for batch in given:
        for row, ids in enumerate(batch["input_ids"]):
            real = batch["attention_mask"][row].bool() if "attention_mask" in batch else torch.ones_like(ids).bool()
            tokens = ids[real]
            with torch.no_grad():
                log_p = model(input_ids=tokens[None]).logits[0].log_softmax(-1)
            for before in range(1, len(tokens)):
                place = next(place for place, (first, last) in PLACES.items() if first <= before <= last)
                result[place].append(-float(log_p[before - 1, tokens[before]]))
    return result


def test_against_a_plain_loop() -> None:
    model, given = stock().eval(), batches()
    theirs = by_a_loop(model, given)
    held = HeldOut(model, given, progress=False)
    patch_model(model, "window", window=4, sinks=1)
    ours = by_a_loop(model, given)
    for result in (held.lost(model), lost(model, given)):
        assert [(each.first, each.last) for each in result.by_position] == list(PLACES.values())
        for place, each in enumerate(result.by_position):
            assert each.tokens == len(ours[place])
            assert each.loss == pytest.approx(sum(ours[place]) / len(ours[place]), rel=1e-5)
            assert each.stock_loss == pytest.approx(sum(theirs[place]) / len(theirs[place]), rel=1e-5)
            assert abs(each.loss - each.stock_loss) > 1e-4
    itself = held.baseline().by_position
    assert [each.loss for each in itself] == [each.stock_loss for each in itself]


def test_rows_behind_the_positions_of_a_model() -> None:
    check_length(stock(max_position_embeddings=130), batches())
    check_length(stock(), [{"pixel_values": torch.zeros(1, 3, 4, 4)}])
    check_length(fresh("t5"), [{"input_ids": torch.zeros(1, 10**4)}])  # it names no bound
    with refused("up to 130 tokens", "made for 129 positions"):
        check_length(stock(max_position_embeddings=129), batches())
