"""Padding, the other rows of the batch and future tokens must not change the output."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests import zoo

from .cells import FAMILY_NAMES, ONCE, OPTIONS, WIDE, Cell, over, over_in_turn
from .harness import CAUSAL_FAMILIES, TEXT_FAMILIES, TOLERANCE, batch_of, distance, swapped

STRENGTHS = (1.0, 0.5)


def counts_padding(cell: Cell) -> bool:
    """`length="fixed"` takes the padded length by definition: only ids of padding must not matter there."""
    return cell[1].get("length") == "fixed"


def outputs(model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """(B,L,V), with positions counted over the real tokens."""
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        return zoo.output(model(input_ids=ids, attention_mask=mask, position_ids=positions))


def rows_of(family: str) -> list[Tensor]:
    """Three texts of different length."""
    ids = zoo.inputs(family, batch=3, length=6)["input_ids"]
    return [ids[0], ids[1, :4], ids[2, :1]]


def pad(rows: list[Tensor], width: int, side: str, filler: int) -> tuple[Tensor, Tensor]:
    def one(row: Tensor, value: int) -> Tensor:
        missing = width - len(row)
        return F.pad(row, (missing, 0) if side == "left" else (0, missing), value=value)

    return torch.stack([one(row, filler) for row in rows]), torch.stack([one(torch.ones_like(row), 0) for row in rows])


def close(got: Tensor, wanted: Tensor) -> None:
    assert distance(got, wanted) <= TOLERANCE[torch.float64]


@over_in_turn(ONCE + OPTIONS, "side", ["left", "right"], TEXT_FAMILIES)
def test_padding_and_batch(family: str, cell: Cell, side: str) -> None:
    """A row alone, in a batch, with more padding, and with other ids in the padding: the same outputs."""
    model, rows = swapped(family, cell, 1.0), rows_of(family)
    alone = [outputs(model, row[None], torch.ones_like(row)[None])[0] for row in rows]
    results = []
    for width, filler in ((6, 3), (6, 9), (9, 3)):
        ids, mask = pad(rows, width, side, filler)
        results.append(outputs(model, ids, mask)[mask.bool()])
    close(results[1], results[0])
    if not counts_padding(cell):
        close(results[0], torch.cat(alone))
        close(results[2], torch.cat(alone))


@over(ONCE, tuple(name for name in FAMILY_NAMES if name not in TEXT_FAMILIES))
def test_other_images_of_the_batch(family: str, cell: Cell) -> None:
    model, batch = swapped(family, cell, 1.0), batch_of(family)
    with torch.no_grad():
        wanted = zoo.output(model(**batch))
        alone = [
            zoo.output(model(**{key: value[i : i + 1] for key, value in batch.items()})) for i in range(len(wanted))
        ]
    close(torch.cat(alone), wanted)


@over_in_turn(WIDE, "strength", STRENGTHS, CAUSAL_FAMILIES)
def test_the_future_has_no_influence(family: str, cell: Cell, strength: float) -> None:
    model = swapped(family, cell, strength)
    ids = batch_of(family)["input_ids"]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        for seen in (1, 4):
            changed = ids.clone()
            changed[:, seen:] = (changed[:, seen:] + 5) % 50 + 5
            got = model(input_ids=changed).logits
            close(got[:, :seen], wanted[:, :seen])
            assert not torch.allclose(got[:, seen:], wanted[:, seen:])
