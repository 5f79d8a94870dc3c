"""Attention in blocks, called as one operator: its rules, its masks and its arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_attn_swap.kernels import weighted

RULES = ("softmax", "softmax_n", "sparsemax", "entmax15")
MASKS = ("none", "bool", "per head", "padding", "numbers", "blind")


def mask_of(kind: str, batch: int, heads: int, queries: int, keys: int, seed: int) -> Tensor | None:
    """A mask as the operator takes it."""
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(seed)
    rows, columns = 1 if kind == "padding" else queries, heads if kind == "per head" else 1
    allowed = torch.rand(batch, columns, rows, keys, generator=generator) < 0.6
    if kind == "blind":
        allowed[0] = False
    if kind != "numbers":
        return allowed
    numbers = torch.randn(allowed.shape, generator=generator, dtype=torch.float64)
    return numbers.masked_fill(~allowed, torch.finfo(torch.float64).min)


def in_blocks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, how: Any, dropout: float = 0.0, seed: int = 0
) -> Tensor:
    rule, gamma, zeta, strength, *n = how
    share = None if strength is None else torch.tensor([strength], dtype=torch.float64)
    number = torch.tensor([seed]) if dropout else None
    return weighted.weighted(q, k, v, mask, share, number, causal, 1.3, rule, *(n or [1.0]), gamma, zeta, dropout)[0]
