"""Every fused form equals its formula, gradients too, over random shapes, masks, grouped heads and precisions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hf_attn_swap import patch_model
from hf_attn_swap.core.masks import Masks
from hf_attn_swap.functional import softmax_n
from hf_attn_swap.kernels import carried, dispatch, hopfield
from hf_attn_swap.kernels import softmax_n as kernel
from tests import zoo
from tests.contract.harness import assert_same, fresh, perturb, run_all

from .drawn import EXACT, MANY, MASKS, SIZES, assert_equal, drawn, gradients, masked
from .readable import softmax_n_reference


@MANY
@given(sizes=SIZES, kind=MASKS, n=st.sampled_from([1.0, 0.25, 3.0]), as_tensor=st.booleans(), seed=st.integers(0, 999))
def test_softmax_n(sizes: tuple[int, ...], kind: str, n: float, as_tensor: bool, seed: int) -> None:
    batch, groups, share, queries, keys, width = sizes
    keys = queries if kind == "causal" else keys
    q, k, v = drawn(seed, (batch, groups * share, queries, width), *[(batch, groups, keys, width)] * 2)
    mask, causal, allowed = masked(kind, batch, queries, keys, seed)
    given_n = torch.tensor([n]) if as_tensor else n
    masks = Masks(queries=queries, keys=keys, device=q.device, given=mask, causal=causal)
    got = kernel.softmax_n_attention(q, k, v, masks.additive(q.dtype)[0], causal, 0.7, given_n)
    assert got is not None
    wanted = softmax_n_reference(q, k, v, allowed, 0.7, given_n)
    assert_equal(got, wanted, [q, k, v], seed + 1)


def test_softmax_n_of_large_scores() -> None:
    """No shift by hand: rows whose greatest score is far below 0, or far above it."""
    for shift in (-600.0, 600.0):
        q, k, v = drawn(0, (1, 1, 3, 4), (1, 1, 5, 4), (1, 1, 5, 4))
        mask = torch.full((1, 1, 3, 5), shift, dtype=torch.float64)
        got = kernel.softmax_n_attention(q, k, v, mask, False, 1.0, 1.0)
        wanted = softmax_n((q @ k.transpose(2, 3)) + shift) @ v
        assert_equal(got, wanted, [q, k, v], 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_softmax_n_of_half_precision_is_as_exact_as_sdpa(dtype: torch.dtype, causal: bool) -> None:
    errors = []
    for n in (0.0, 1.0):
        q, k, v = drawn(3, *[(2, 3, 65, 32)] * 3, dtype=dtype)
        exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
        allowed = torch.ones(65, 65, dtype=torch.bool).tril()[None, None] if causal else torch.ones(1, 1, 65, 65).bool()
        wanted = softmax_n_reference(*exact, allowed, 0.2, n)
        if n:
            got = kernel.softmax_n_attention(q, k, v, None, causal, 0.2, n)
        else:
            got = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=0.2)
        pairs = zip((got, *gradients(got, [q, k, v], 4)), (wanted, *gradients(wanted, exact, 4)), strict=True)
        errors.append([(own.double() - other).abs().max().item() for own, other in pairs])
    assert all(own <= 2 * sdpa for sdpa, own in zip(*errors, strict=True)), errors


def test_softmax_n_leaves_to_sdpa_what_its_kernel_does_not_take() -> None:
    q, k, v = drawn(0, *[(1, 2, 4, 8)] * 3)

    def fits(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout: float = 0.0) -> bool:
        return kernel.softmax_n_attention(q, k, v, mask, False, 0.7, 1.0, dropout) is not None

    assert fits(q, k, v)
    assert not fits(q, k.float(), v)
    assert not fits(q, k, v[..., :4])
    assert not fits(q.to("meta"), k, v)
    assert not fits(q[:0], k[:0], v[:0])
    assert not fits(q, k[:, :, :0], v[:, :, :0])
    assert not fits(q, k, v, torch.zeros(1, 1, 4, 4, requires_grad=True))
    assert not fits(q, k, v, None, 0.1)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert not fits(q, k, v)


@MANY
@given(sizes=SIZES, kind=MASKS, layers=st.integers(1, 4), fresh=st.booleans(), seed=st.integers(0, 999))
def test_carried_scores(sizes: tuple[int, ...], kind: str, layers: int, fresh: bool, seed: int) -> None:
    """H moved on in place through several layers, and the form that never holds H, against the plain formula."""
    batch, groups, share, queries, keys, width = sizes
    keys = queries if kind == "causal" else keys
    shapes = [(batch, groups * share, queries, width), *[(batch, groups, keys, width)] * 2] * layers
    inputs = drawn(seed, *shapes)
    _, causal, allowed = masked(kind, batch, queries, keys, seed)
    blind = ~allowed.any(-1, keepdim=True)
    blocked, hidden, moved, terms = ~(allowed | blind), None, None, []
    got, long, wanted = [], [], []
    for layer in range(layers):
        q, k, v = inputs[3 * layer : 3 * layer + 3]
        k_all, v_all = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        hidden = 0.6 * (q @ k_all.transpose(2, 3)) + (0 if hidden is None else 0.4 * hidden)
        weights = hidden.masked_fill(blocked, -torch.inf).softmax(-1)
        wanted.append((weights @ v_all).masked_fill(blind, 0.0))
        put = blocked if layer == 0 else None
        moved, heads = hopfield.attend(moved, q, k, v, decay=0.4, weight=0.6, blocked=put, fresh=fresh)
        got.append(heads.masked_fill(blind, 0.0))
        terms = [(a, b, weight * 0.4) for a, b, weight in terms] + [(q, k_all, 0.6)]
        long.append(hopfield.attend_long(terms, v_all, None if causal else allowed, causal))
    assert_equal(torch.stack(long), torch.stack(wanted), inputs, seed + 1)
    assert_equal(torch.stack(got), torch.stack(wanted), inputs, seed + 1)


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize("padded", [None, "left"])
@pytest.mark.parametrize("block", [1, 10**9])
def test_long_sequences_never_hold_scores(
    family: str, padded: str | None, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = perturb(patch_model(fresh(family), "modern_hopfield"))
    batch = zoo.inputs(family, batch=2, length=9, padded=padded)
    wanted = run_all(model, batch)
    with torch.no_grad():
        read = model(**batch)
    monkeypatch.setattr(dispatch, "LONG", 9)
    monkeypatch.setattr(hopfield, "BLOCK", block)
    calls = []
    in_blocks = hopfield.attend_long
    monkeypatch.setattr(hopfield, "attend_long", lambda *args: calls.append(1) or in_blocks(*args))
    assert_same(run_all(model, batch), wanted)
    assert len(calls) == model.config.num_hidden_layers
    with torch.no_grad():
        torch.testing.assert_close(model(**batch)[0], read[0], rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("keys", [1, 5])
def test_blocks_of_long_sequences_read_their_rows_of_the_mask(
    rows: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask with one row is that of every block."""
    q, k, v = drawn(0, (2, 2, 6, 3), *[(2, 2, keys, 3)] * 2)
    allowed = torch.rand(2, 1, rows, keys, generator=torch.Generator().manual_seed(1)) < 0.6
    heads = []
    for block in (1, 10**9):
        monkeypatch.setattr(hopfield, "BLOCK", block)
        heads.append(hopfield.attend_long([(q, k, 0.5)], v, allowed, False))
    assert_equal(heads[0], heads[1], [q, k, v], 2)


def test_low_memory_never_holds_scores_at_middle_length(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = zoo.inputs("bert", batch=2, length=9)
    monkeypatch.setattr(dispatch, "MIDDLE", 9)
    calls = []
    in_blocks = hopfield.attend_long
    monkeypatch.setattr(hopfield, "attend_long", lambda *args: calls.append(1) or in_blocks(*args))
    wanted = run_all(perturb(patch_model(fresh("bert"), "modern_hopfield", memory="auto")), batch)
    assert not calls
    model = perturb(patch_model(fresh("bert"), "modern_hopfield", memory="low"))
    assert_same(run_all(model, batch), wanted)
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize("train", [False, True])
def test_one_h_is_alive(train: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patch_model(fresh("bert", num_hidden_layers=5), "modern_hopfield")
    places, alive = set(), []
    leave = carried.leave

    def watched(hidden: Any, call: Any, *, drop: bool) -> None:
        leave(hidden, call, drop=drop)
        held = [kept.scores for kept in call.context.scores.values()]
        alive.append(len(held))
        places.update(scores.data_ptr() for scores in held)

    monkeypatch.setattr(carried, "leave", watched)
    with torch.set_grad_enabled(train):
        model(**zoo.inputs("bert", batch=2, length=7))
    assert alive == [1, 1, 1, 1, int(train)]
    assert len(places) == 1, "moved on in place"
