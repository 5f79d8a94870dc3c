"""Attention in blocks equals its formula, gradients too, finds thresholds without a sort, and holds no Q x K tensor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, library

from hf_attn_swap import patch_model
from hf_attn_swap.functional import clip, entmax15, softmax_n, sparsemax
from hf_attn_swap.kernels import blocks, thresholds, weighted
from hf_attn_swap.kernels.thresholds import entmax15_threshold, sparsemax_threshold
from tests import zoo
from tests.contract.harness import fresh

from .drawn import SIZES, drawn, gradients
from .in_blocks import MASKS, RULES, in_blocks, mask_of
from .largest import Largest

EXACT = 1e-10
CLIPS = ((0.0, 1.0), (-0.05, 1.0), (-0.05, 1.1), (0.0, 1.2))


def weights_of(scores: Tensor, rule: str, gamma: float, zeta: float, strength: float | None) -> Tensor:
    """The readable weights of masked scores."""
    share = 1.0 if strength is None else strength
    soft = torch.softmax(scores, -1)
    if rule == "softmax_n":
        soft = softmax_n(scores, share)
    elif rule != "softmax":
        sparse = sparsemax(scores) if rule == "sparsemax" else entmax15(scores)
        soft = (1 - share) * soft + share * sparse
    return clip(soft, share * gamma, 1 + share * (zeta - 1))


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, how: Any, kept: Any = 1.0) -> Tensor:
    """The readable heads (B,Q,H,D) at scaling 1.3."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = 1.3 * q @ k.mT
    allowed = torch.ones(scores.shape, dtype=torch.bool)
    if causal:
        allowed = allowed.tril(k.shape[2] - q.shape[2])
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        inside = mask > torch.finfo(mask.dtype).min / 2
        allowed, scores = allowed & inside, scores + mask.masked_fill(~inside, 0.0)
    weights = weights_of(scores.masked_fill(~allowed, torch.finfo(q.dtype).min), *how)
    return ((weights.masked_fill(~allowed, 0.0) * kept) @ v).transpose(1, 2)


def assert_equal(got: Tensor, wanted: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(got, wanted, rtol=EXACT, atol=EXACT)
    for own, other in zip(gradients(got, inputs, 7), gradients(wanted, inputs, 7), strict=True):
        torch.testing.assert_close(own, other, rtol=EXACT, atol=EXACT)


@settings(max_examples=80, deadline=None)
@given(
    sizes=SIZES,
    rule=st.sampled_from(RULES),
    ends=st.sampled_from(CLIPS),
    strength=st.sampled_from([None, 0.3]),
    kind=st.sampled_from(MASKS),
    causal=st.booleans(),
    block=st.sampled_from([(1, 1), (30, 2), (2**20, 64)]),
    seed=st.integers(0, 999),
)
def test_equals_the_formula(
    sizes: tuple[int, ...],
    rule: str,
    ends: tuple[float, float],
    strength: float | None,
    kind: str,
    causal: bool,
    block: tuple[int, int],
    seed: int,
) -> None:
    batch, groups, share, queries, keys, width = sizes
    queries = min(queries, keys) if causal else queries
    q, k, v = drawn(seed, (batch, groups * share, queries, width), *[(batch, groups, keys, width)] * 2)
    mask, how = mask_of(kind, batch, groups * share, queries, keys, seed), (rule, *ends, strength)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(blocks.SCORES, "cpu", block[0])
        patched.setattr(blocks, "ROWS", block[1])
        got = in_blocks(q, k, v, mask, causal, how)
        assert_equal(got, reference(q, k, v, mask, causal, how), [q, k, v])


def test_steps_are_equal_and_as_few_as_possible() -> None:
    for total, most in itertools.product(range(1, 40), (1, 2, 7, 40)):
        size = blocks.even(total, most)
        steps = -(-total // size)
        assert size <= most
        assert steps == -(-total // most)
        assert size - 1 < total / steps <= size, "no smaller size needs as few steps"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("ends", "block"), [(CLIPS[0], 2**20), (CLIPS[2], 1)])
def test_dropout(rule: str, ends: tuple[float, float], block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a seed drops is read from values that are unit vectors; then values and gradients equal the formula's."""
    monkeypatch.setitem(blocks.SCORES, "cpu", block)
    monkeypatch.setattr(blocks, "ROWS", 3)
    how = (rule, *ends, None)
    q, k, v = drawn(0, *[(2, 4, 20, 8)] * 3)
    units = torch.eye(20, dtype=torch.float64).expand(2, 4, 20, 20)
    whole, dropped = (in_blocks(q, k, units, None, True, how, rate, 5).transpose(1, 2) for rate in (0.0, 0.25))
    kept = torch.where(whole > 0, dropped / whole, 0.0).detach()
    read = kept[whole > 0]
    stays = read > 0
    torch.testing.assert_close(read[stays], torch.full_like(read[stays], 1 / 0.75))
    assert 0.5 < stays.double().mean() < 0.95
    assert not torch.equal(stays[: len(stays) // 2], stays[len(stays) // 2 : 2 * (len(stays) // 2)])
    got = in_blocks(q, k, v, None, True, how, 0.25, 5)
    assert_equal(got, reference(q, k, v, None, True, how, kept), [q, k, v])
    assert torch.equal(got, in_blocks(q, k, v, None, True, how, 0.25, 5))
    assert not torch.equal(got, in_blocks(q, k, v, None, True, how, 0.25, 6))
    assert not in_blocks(q, k, v, None, True, how, 1.0, 5).any()


@pytest.mark.parametrize(("dtype", "causal"), [(torch.bfloat16, True), (torch.float16, False)])
@pytest.mark.parametrize("how", [(rule, -0.025, 1.0, None) for rule in RULES])
def test_half_precision_is_as_exact_as_sdpa(dtype: torch.dtype, causal: bool, how: Any) -> None:
    given = drawn(3, *[(2, 3, 65, 32)] * 3, dtype=dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]

    def errors(got: Tensor, wanted: Tensor) -> list[float]:
        pairs = zip((got, *gradients(got, given, 4)), (wanted, *gradients(wanted, exact, 4)), strict=True)
        return [(own.double() - other).abs().max().item() for own, other in pairs]

    sdpa = F.scaled_dot_product_attention(*given, is_causal=causal, scale=1.3).transpose(1, 2)
    of_sdpa = errors(sdpa, reference(*exact, None, causal, ("softmax", 0.0, 1.0, None)))
    own = errors(in_blocks(*given, None, causal, how), reference(*exact, None, causal, how))
    assert all(mine <= 2 * theirs for mine, theirs in zip(own, of_sdpa, strict=True)), (own, of_sdpa)


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float32, torch.bfloat16), (torch.float64, torch.float64)])
def test_autocast_casts_what_is_multiplied(dtype: torch.dtype, wanted: torch.dtype) -> None:
    """As autocast casts the factors of a product; float64 stays."""
    tensor = torch.ones(2, dtype=dtype)
    assert weighted.as_products(tensor) is tensor
    with torch.autocast("cpu", torch.bfloat16):
        assert weighted.as_products(tensor).dtype == wanted


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("causal", "dropout", "strength"), [(True, 0.0, None), (False, 0.5, 0.5)])
def test_no_tensor_of_queries_and_keys(rule: str, causal: bool, dropout: float, strength: float | None) -> None:
    """Memory grows with the length and not with its square: twice the length, twice the largest tensor at most."""
    share = None if strength is None else torch.tensor([strength])
    largest = []
    for length in (128, 256):
        q, k, v = (tensor.detach() for tensor in drawn(0, *[(1, 2, length, 4)] * 3, dtype=torch.float32))
        padding = torch.ones(1, 1, 1, length, dtype=torch.bool)
        words = (padding, share, torch.tensor([0]), causal, 0.5, rule, 1.0, -0.01, 1.0, dropout)
        with pytest.MonkeyPatch.context() as patched:
            patched.setitem(blocks.SCORES, "cpu", 1)
            patched.setattr(blocks, "ROWS", 8)
            with Largest() as seen:
                heads, rows = weighted.compute(q, k, v, *words)
                weighted.compute_backward(heads, rows, q, k, v, *words)
        largest.append(seen.size)
        assert seen.size < length * length / 4
    assert largest[1] <= 2 * largest[0]


def test_the_operators_are_sound() -> None:
    """Schema, fake form and gradients as `torch.compile` needs them."""
    q, k, v = drawn(0, (2, 4, 6, 3), *[(2, 2, 6, 3)] * 2)
    mask = torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    for strength in (None, torch.tensor([0.5])):
        words = (q, k, v, mask, strength, torch.tensor([1]), True, 0.5, "sparsemax", 1.0, -0.1, 1.0, 0.2)
        library.opcheck(weighted.weighted, words)


@pytest.mark.slow
def test_a_compiler_calls_the_operator() -> None:
    model = patch_model(fresh("llama", num_hidden_layers=2), "outeffhop+clipped_softmax")
    batch = zoo.inputs("llama", batch=2, length=9, padded="left")
    wanted = model(**batch).logits
    nodes: list[str] = []

    def noted(graph: Any, _: Any) -> Any:
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    got = torch.compile(model, backend=noted, fullgraph=True)(**batch).logits
    torch._dynamo.reset()
    assert sum("hf_attn_swap.weighted" in node for node in nodes) == model.config.num_hidden_layers
    torch.testing.assert_close(got, wanted, rtol=EXACT, atol=EXACT)


def test_an_exported_program_needs_no_operator_of_ours() -> None:
    model = patch_model(fresh("bert"), "sparsemax").eval()
    batch = zoo.inputs("bert", batch=2, length=7)
    program = torch.export.export(model, (), dict(batch), strict=False)
    assert "hf_attn_swap" not in program.graph_module.code
    got = program.module()(**batch).logits
    torch.testing.assert_close(got, model(**batch).logits, rtol=EXACT, atol=EXACT)


def test_a_mask_that_learns_gets_its_gradient() -> None:
    """The operator has no gradient for the mask, so the readable form runs."""
    model, slopes = patch_model(fresh("bert"), "sparsemax"), []
    for want in (False, True):
        mask = torch.zeros(2, 1, 7, 7, dtype=torch.float64, requires_grad=True)
        batch = zoo.inputs("bert", batch=2, length=7) | {"attention_mask": mask}
        loss = model(**batch, output_attentions=want).logits.square().sum()
        slopes.append(torch.autograd.grad(loss, mask)[0])
    assert slopes[0].any()
    torch.testing.assert_close(*slopes, rtol=EXACT, atol=EXACT)


ROWS = st.sampled_from(["normal", "equal", "tied", "falling", "far"])


@settings(max_examples=80, deadline=None)
@given(
    kind=ROWS,
    scale=st.sampled_from([1e-6, 0.1, 1.0, 30.0]),
    keys=st.sampled_from([1, 2, 17, 1000]),
    seed=st.integers(0, 999),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_thresholds_equal_the_sorted_form(kind: str, scale: float, keys: int, seed: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(3, keys, generator=generator, dtype=torch.float64)
    number = torch.arange(keys, dtype=torch.float64)
    rows = {
        "normal": normal,
        "equal": torch.zeros(3, keys, dtype=torch.float64),
        "tied": normal.round(),
        "falling": -(0.7**number).expand(3, -1),
        "far": torch.where(number % 7 == 0, 0.0, -1e9).expand(3, -1),
    }[kind]
    scores = (scale * rows).to(dtype)
    centred = scores - scores.amax(-1, keepdim=True)
    near = 1e-6 if dtype == torch.float32 else EXACT
    sparse = (centred - sparsemax_threshold(centred)).relu()
    torch.testing.assert_close(sparse, sparsemax(scores), rtol=0, atol=near)
    half = centred / 2
    entmax = (half - entmax15_threshold(half)).relu().square()
    torch.testing.assert_close(entmax, entmax15(scores), rtol=0, atol=near)
    for weights in (sparse, entmax):
        torch.testing.assert_close(weights.sum(-1), torch.ones(3, dtype=dtype), rtol=0, atol=10 * near)


@pytest.mark.parametrize("find", [sparsemax_threshold, entmax15_threshold])
def test_thresholds_are_there_after_a_few_steps(find: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong slope would find them too, but slowly."""
    scores = torch.randn(200, 1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    centred = (scores - scores.amax(-1, keepdim=True)) / 2
    wanted = find(centred)
    monkeypatch.setattr(thresholds, "STEPS", 8)
    torch.testing.assert_close(find(centred), wanted, rtol=EXACT, atol=EXACT)
