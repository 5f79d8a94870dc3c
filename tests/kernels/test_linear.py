"""The operator of causal linear attention equals the formula, gradients too, and holds nothing large beside results."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, library
from torch.profiler import ProfilerActivity, profile

from hf_attn_swap.kernels import linear

from .drawn import MANY, assert_equal, drawn

SIZES = st.tuples(*(st.integers(1, high) for high in (3, 2, 40, 6, 5)))  # B, H, L, D, width of the values
CUTS = st.tuples(st.sampled_from([1, 7, 64]), st.sampled_from([1, 2, 16]))  # tokens of a block, blocks of a span
SEEDS = st.integers(0, 999)


def in_memory_order(tensor: Tensor, heads_first: bool) -> Tensor:
    """The same numbers, laid out as (B,H,L,D) or, as models hand them over, as (B,L,H,D)."""
    order = (0, 1, 2, 3) if heads_first else (0, 2, 1, 3)
    return tensor.detach().permute(order).contiguous().permute(order).requires_grad_()


@MANY
@given(sizes=SIZES, cuts=CUTS, past=st.integers(0, 5), heads_first=st.booleans(), seed=SEEDS)
def test_causal(sizes: tuple[int, ...], cuts: tuple[int, int], past: int, heads_first: bool, seed: int) -> None:
    batch, heads, length, width, out = sizes
    shapes = (length, width), (length + past, width), (length + past, out)
    q, k, v = (
        in_memory_order(tensor, heads_first) for tensor in drawn(seed, *((batch, heads, *shape) for shape in shapes))
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(linear, "BLOCK", cuts[0])
        patched.setattr(linear, "SPAN", cuts[1])
        got = linear.attend(q, k, v, key_mask=None, length="true", past=None)
        visible = torch.arange(past + 1, past + length + 1).to(q.dtype)
        wanted = ((q @ k.mT).tril(past) @ v) / visible.sqrt()[:, None]
        assert_equal(got, wanted, [q, k, v], seed + 1)


def test_the_operator_is_sound() -> None:
    """Schema, fake form and gradients as `torch.compile` and `torch.export` need them."""
    q, k, v, state = drawn(0, *[(2, 2, 70, 4)] * 3, (2, 2, 4, 4))
    factor = torch.arange(1, 71).double().rsqrt()[None]
    library.opcheck(linear.causal_linear, (q, k, v, state, factor))


def test_causal_in_half_precision_sums_in_fp32() -> None:
    """Summed in bf16, a state of 16,384 tokens would lose every further block of 64."""
    ones = torch.ones(1, 1, 40_000, 2, dtype=torch.bfloat16)
    state = torch.zeros(1, 1, 2, 2, dtype=torch.bfloat16)
    out, _ = linear.causal_linear(ones, ones, ones, state, torch.ones(1, 40_000))
    assert out[0, 0, -1, 0].item() == pytest.approx(80_000, rel=2**-8)


def test_a_training_step_makes_four_large_tensors() -> None:
    """The result and three gradients. Every further one would cost page faults and memory, one per layer.

    The tensors lie in memory as models hand them over, two rows of a batch, in which a flat copy of the heads would be
    a fifth tensor.
    """
    shape = (2, 3, 4096, 16)
    q, k, v, grad = (in_memory_order(tensor, False) for tensor in drawn(0, *[shape] * 4, dtype=torch.bfloat16))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        out = linear.attend(q, k, v, key_mask=None, length="true", past=None)
        torch.autograd.grad(out, (q, k, v), grad.detach())
    sizes = [event.self_cpu_memory_usage for event in profiled.events()]
    large = q.numel() * q.element_size() // 2
    assert [size for size in sizes if size > large] == [2 * large] * 4
    assert out.transpose(1, 2).is_contiguous(), "as W_o reads it"
