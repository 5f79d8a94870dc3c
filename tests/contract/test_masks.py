"""4-D masks, packed sequences and sliding windows, on every variant, against forms that say the same otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import zoo

from .cells import EVERY, EXTRA_CELLS, Cell, label, swap_in
from .harness import (
    BATCH, CAUSAL_FAMILIES, LENGTH, TEXT_FAMILIES, TOLERANCE, assert_same, batch_of, distance, forward, fresh,
    padding_side, perturb, run_all,
)  # fmt: skip

CELLS: tuple[Cell, ...] = (*((name, {}) for name in EVERY), *EXTRA_CELLS)
CELLS = tuple(cell for cell in CELLS if cell[1].get("length") != "fixed") + tuple(
    cell for cell in CELLS if cell[1].get("length") == "fixed" and len(cell[1]) == 1
)


def model_of(family: str, cell: Cell, strength: float = 1.0, **overrides: Any) -> Any:
    return perturb(swap_in(fresh(family, **overrides), cell[0], strength=strength, **cell[1]))


def dense(family: str, batch: dict[str, Any]) -> Tensor:
    """(B,1,Q,K) bool: the plain mask that the model would build itself."""
    mask = batch["attention_mask"].bool()[:, None, None, :].expand(-1, 1, LENGTH, LENGTH)
    return mask.tril() if family in CAUSAL_FAMILIES else mask


def additive(mask: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float64).min)


@pytest.mark.parametrize("family", TEXT_FAMILIES)
@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("cell", CELLS, ids=label)
def test_plain_masks_given_in_four_dimensions(family: str, cell: Cell, strength: float) -> None:
    """The same mask as 2-D, as 4-D bool and as 4-D float: the same outputs and gradients."""
    model, batch = model_of(family, cell, strength), batch_of(family, padded=padding_side(family))
    real = batch["attention_mask"]
    positions = (real.cumsum(-1) - 1).clamp_min(0)
    wanted = run_all(model, {**batch, "position_ids": positions})
    mask = dense(family, batch)
    for given in (mask, additive(mask), mask.expand(-1, model.config.num_attention_heads, -1, -1)):
        shown = {**batch, "position_ids": positions, "attention_mask": given}
        assert_same(run_all(Masked(model, real), shown), wanted)


class Masked(torch.nn.Module):
    """A model that returns only the outputs of real tokens: a 4-D mask does not say which those are."""

    def __init__(self, model: Any, real: Tensor) -> None:
        super().__init__()
        self.model, self.real = model, real.bool()

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.named_parameters(*args, **kwargs)

    def forward(self, **batch: Any) -> Any:
        out = self.model(**batch)
        return type(out)(logits=zoo.output(out)[self.real])
