"""Small memory modules and inputs for the tests beside this file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_attn_swap.memory import NORMALIZERS, HopfieldAssociation, HopfieldLayer, HopfieldPooling, HopfieldRetrieval

SUM_TO_ONE = [name for name in NORMALIZERS if name != "outeffhop"]
every_normalizer = pytest.mark.parametrize("normalizer", NORMALIZERS)


def tensor(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(got, wanted, atol=tolerance, rtol=tolerance)


def retrieval(**options: Any) -> Callable[..., Tensor]:
    module = HopfieldRetrieval(**options)
    return lambda state, stored, **masks: module(state.view(1, -1, state.shape[-1]), stored, **masks)[0]


def built(name: str, normalizer: str, **options: Any) -> tuple[torch.nn.Module, tuple[Tensor, ...]]:
    """A module in float64 and inputs of 3 rows: 4 states of width 6, 5 stored patterns."""
    torch.manual_seed(0)
    state, stored = normal(1, 3, 4, 6), normal(2, 3, 5, 6)
    if name == "retrieval":
        return HopfieldRetrieval(normalizer=normalizer, **options), (state, stored)
    options = {"heads": 2, "inner_width": 8, "normalizer": normalizer, **options}
    if name == "association":
        return HopfieldAssociation(6, stored_width=3, **options).double(), (state, stored[..., :3])
    if name == "pooling":
        return HopfieldPooling(6, queries=2, **options).double(), (stored,)
    return HopfieldLayer(6, 7, **options).double(), (state,)


every_module = pytest.mark.parametrize("name", ["retrieval", "association", "pooling", "layer"])
with_memory = pytest.mark.parametrize("name", ["retrieval", "association", "pooling"])
