"""Causal linear attention by flash-linear-attention: a stand-in has fla's documented arguments and plain formulas."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_attn_swap import patch_model
from hf_attn_swap.functional import simple_attention
from hf_attn_swap.kernels import linear, linear_fla
from hf_attn_swap.kernels.dispatch import Form, Setting, linear_form
from tests import zoo
from tests.contract.harness import assert_same, fresh, run_all

from .drawn import MANY, assert_equal, drawn

BF16 = torch.bfloat16
CALLS: list[torch.Size] = []


def chunk_linear_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    normalize: bool = True,
    head_first: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(B,T,H,D), a state (B,H,D,D); the default scale and the default normalization are not ours."""
    if head_first or q.shape[1] < q.shape[2]:
        raise DeprecationWarning("seq_len < num_heads")
    CALLS.append(q.shape)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q * (q.shape[-1] ** -0.5 if scale is None else scale), k, v))
    state = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]) if initial_state is None else initial_state
    out = q @ state + (q @ k.transpose(2, 3)).tril() @ v
    if normalize:
        out = out / (q * k.cumsum(2)).sum(-1, keepdim=True)
    return out.transpose(1, 2), None


def older(q: Tensor, k: Tensor, v: Tensor, scale: Any, initial_state: Any, output_final_state: Any, normalize: Any):
    """The first versions took heads before tokens, and no argument says so."""


def install(function: Any, patched: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("fla.ops.linear_attn")
    module.chunk_linear_attn = function
    for name in ("fla", "fla.ops"):
        patched.setitem(sys.modules, name, ModuleType(name))
    patched.setitem(sys.modules, "fla.ops.linear_attn", module)
    linear_fla.kernel.cache_clear()


@pytest.fixture
def fla() -> Iterator[list[torch.Size]]:
    CALLS.clear()
    with pytest.MonkeyPatch.context() as patched:
        install(chunk_linear_attn, patched)
        yield CALLS
    linear_fla.kernel.cache_clear()


SIZES = st.tuples(*(st.integers(1, high) for high in (3, 4, 9, 6)))  # B, H, L, D


@MANY
@given(
    sizes=SIZES,
    behind=st.integers(0, 3),
    padded=st.booleans(),
    length=st.sampled_from(["true", "fixed"]),
    with_past=st.booleans(),
    seed=st.integers(0, 999),
)
def test_values_and_gradients(
    sizes: tuple[int, ...], behind: int, padded: bool, length: str, with_past: bool, seed: int
) -> None:
    batch, heads, tokens, width = sizes
    keys = tokens + behind
    shared = heads // 2 if heads % 2 == 0 else heads  # groups of heads may share the sum over earlier tokens
    shapes = (batch, heads, tokens, width), (batch, heads, keys, width), (batch, heads, keys, width)
    q, k, v, state = drawn(seed, *shapes, (batch, shared, width, width))
    mask = torch.rand(batch, keys, generator=torch.Generator().manual_seed(seed)) < 0.7 if padded else None
    past = (state, torch.full((batch,), 4), torch.tensor([5])) if with_past else None
    given: dict[str, Any] = {"key_mask": mask, "length": length, "past": past}
    with pytest.MonkeyPatch.context() as patched:
        install(chunk_linear_attn, patched)
        got = linear_fla.attend(q, k, v, **given)
    linear_fla.kernel.cache_clear()
    inputs = [q, k, v, state] if with_past else [q, k, v]
    assert_equal(got, simple_attention(q, k, v, causal=True, **given), inputs, seed + 1)


@pytest.mark.parametrize("padded", [None, "left"])
def test_a_whole_model(padded: str | None, fla: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(fresh("llama", max_position_embeddings=140), "simpletron_resl")
    batch = zoo.inputs("llama", batch=2, length=131, padded=padded)
    wanted = run_all(model, batch)
    monkeypatch.setattr(linear, "available", lambda device: False)
    monkeypatch.setattr(linear_fla, "available", lambda device, dtype: True)
    assert_same(run_all(model, batch), wanted)
    heads = model.config.num_attention_heads
    assert fla == [(2 * heads, 131, 1, 8)] * model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("given", "form"),
    [
        ({}, Form.FLA),
        ({"causal": True, "tokens": (129, 129)}, Form.FLA),
        ({"causal": True, "tokens": (128, 300)}, Form.PRODUCTS),
        ({"causal": False}, Form.PRODUCTS),
        ({"dtypes": (torch.float32,) * 3}, Form.PRODUCTS),
        ({"dtypes": (torch.float16,) * 3}, Form.PRODUCTS),
        ({"dtypes": (BF16, BF16, torch.float32)}, Form.PRODUCTS),
        ({"compiling": True}, Form.PRODUCTS),
        ({"recorded": True}, Form.PRODUCTS),
        ({"device": "mps"}, Form.PRODUCTS),
        ({"device": "cpu"}, Form.BLOCKS),
    ],
)
def test_the_form(given: dict[str, Any], form: Form, fla: list[torch.Size]) -> None:
    assert linear_form(Setting(**{"device": "cuda", "dtypes": (BF16,) * 3, **given})) is form


def test_a_version_with_other_arguments_is_not_called(fla: list[torch.Size], monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(device="cuda", dtypes=(BF16,) * 3)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert linear_form(setting) is Form.PRODUCTS
    monkeypatch.setattr(torch.version, "hip", None)
    assert linear_form(setting) is Form.FLA
    install(older, monkeypatch)
    assert linear_form(setting) is Form.PRODUCTS
    monkeypatch.setitem(sys.modules, "fla.ops.linear_attn", None)
    linear_fla.kernel.cache_clear()
    assert linear_form(setting) is Form.PRODUCTS, "fla is not installed"


def test_a_second_derivative_is_refused(fla: list[torch.Size]) -> None:
    """fla's backward pass gives numbers that autograd cannot look into."""
    given = drawn(0, *[(2, 2, 5, 3)] * 3)
    heads = linear_fla.attend(*given, key_mask=None, length="true", past=None)
    torch.autograd.grad(heads.sum(), given, retain_graph=True)
    with pytest.raises(ValueError, match="no second derivative"):
        torch.autograd.grad(heads.sum(), given, create_graph=True)
