"""Batches that a fit is made on."""

from __future__ import annotations

from typing import Any

import torch

from tests.contract.harness import batch_of, padding_side


def batches(name: str, count: int = 12, padded: str | None = None) -> list[dict[str, Any]]:
    """More tokens than a map has unknowns."""
    return [batch_of(name, padded=padded, seed=seed) for seed in range(count)]


def padded_batches(name: str, dtype: torch.dtype = torch.float64) -> list[dict[str, Any]]:
    """Six, padded where the family is."""
    return [batch_of(name, dtype, padded=padding_side(name), seed=seed) for seed in range(6)]
