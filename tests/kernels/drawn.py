"""What an operator gets, drawn at random: its sizes, its mask and its tensors; and how its result is compared."""

from __future__ import annotations

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from tests.contract.harness import TOLERANCE

EXACT = TOLERANCE[torch.float64]
MANY = settings(max_examples=40, deadline=None)
SIZES = st.tuples(*(st.integers(1, high) for high in (3, 2, 3, 9, 9, 5)))  # B, G, heads per group, Q, K, D
MASKS = st.sampled_from(["none", "causal", "bool", "float", "row", "blind"])


def drawn(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64).mul_(2).to(dtype) for shape in shapes]
    return [tensor.requires_grad_() for tensor in made]


def masked(kind: str, batch: int, queries: int, keys: int, seed: int) -> tuple[Tensor | None, bool, Tensor]:
    """The mask as SDPA takes it, the causal flag, and where a query may look (B,1,Q,K)."""
    if kind == "none":
        return None, False, torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    if kind == "causal":
        return None, True, torch.ones(queries, keys, dtype=torch.bool).tril()[None, None]
    generator = torch.Generator().manual_seed(seed)
    rows = 1 if kind == "row" else queries
    allowed = torch.rand(batch, 1, rows, keys, generator=generator) < 0.6
    allowed = allowed & False if kind == "blind" else allowed
    given = torch.zeros(allowed.shape, dtype=torch.float64).masked_fill(~allowed, -torch.inf)
    return (given if kind == "float" else allowed.expand(-1, -1, queries, -1)), False, allowed


def gradients(out: Tensor, inputs: list[Tensor], seed: int) -> tuple[Tensor, ...]:
    return torch.autograd.grad(out, inputs, drawn(seed, tuple(out.shape))[0].detach().to(out.dtype), retain_graph=True)


def assert_equal(got: Tensor, wanted: Tensor, inputs: list[Tensor], seed: int) -> None:
    torch.testing.assert_close(got, wanted, rtol=EXACT, atol=EXACT)
    for own, other in zip(gradients(got, inputs, seed), gradients(wanted, inputs, seed), strict=True):
        torch.testing.assert_close(own, other, rtol=EXACT, atol=EXACT)
