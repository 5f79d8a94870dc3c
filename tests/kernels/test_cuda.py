"""softmax_n by the kernels of CUDA: stand-ins compute by plain formulas what the kernels are documented to do.

No CUDA device runs here. The tests hold which kernel is chosen, what it is given, and that values and gradients are
right if the kernel keeps to its contract.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.backends import cuda

from hf_attn_swap import patch_model
from hf_attn_swap.core.masks import Masks
from hf_attn_swap.kernels import softmax_n as kernel
from hf_attn_swap.kernels import stock_softmax
from hf_attn_swap.kernels.dispatch import Form, Setting, softmax_n_form
from hf_attn_swap.kernels.stock_softmax import Efficient, Flash, KernelOutput, Operators, SdpaArgs
from tests import zoo
from tests.contract.harness import assert_same, fresh, perturb, run_all
from tests.harness.places import turns

from .drawn import MANY, MASKS, SIZES, assert_equal, drawn, masked
from .readable import softmax_n_reference

LOG2E = math.log2(math.e)
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def kept_weights(seed: Tensor, shape: torch.Size, dropout: float) -> Tensor:
    """What the weights are multiplied by: 0 or 1 / (1 - dropout), the same for the same seed."""
    drawn_BHQK = torch.rand(shape, generator=torch.Generator().manual_seed(int(seed[0])))
    return (drawn_BHQK >= dropout).double() / (1 - dropout)


def scores_of(query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float) -> Tensor:
    """The scores (B,H,Q,K) times log2(e): the kernels compute with powers of 2."""
    scores = query @ key.transpose(2, 3) * scale
    scores = scores if bias is None else scores + bias
    unseen = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    return (scores.masked_fill(unseen, -torch.inf) if causal else scores) * LOG2E


def attention(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, dropout: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The heads in the kernels' order in memory, (B,Q,H,D); the natural log-sum-exp (B,H,Q); and the seed."""
    scores = scores_of(query, key, bias, causal, scale)
    top = scores.amax(-1, keepdim=True)
    powers = torch.exp2(scores - top)
    total = powers.sum(-1, keepdim=True)
    seed = torch.randint(2**31, (2,))
    weights = powers / total * kept_weights(seed, scores.shape, dropout)
    heads = (weights @ value).transpose(1, 2).contiguous().transpose(1, 2)
    return heads, (top / LOG2E + total.log()).squeeze(-1), seed


def attention_backward(
    grad: Tensor,
    three: tuple[Tensor, ...],
    bias: Tensor | None,
    heads: Tensor,
    lse: Tensor,
    seed: Tensor,
    how: tuple[float, bool, float],
) -> tuple[Tensor, ...]:
    """The gradients from the given heads and log-sum-exp, which need not be those of softmax."""
    (query, key, value), (dropout, causal, scale) = three, how
    assert grad.stride(-1) == 1
    assert heads.transpose(1, 2).is_contiguous(), "the kernel derives the strides of a row from the shape"
    weights = torch.exp2(scores_of(query, key, bias, causal, scale) - lse.unsqueeze(-1) * LOG2E)
    kept = kept_weights(seed, weights.shape, dropout)
    of_scores = weights * (kept * (grad @ value.transpose(2, 3)) - (grad * heads).sum(-1, keepdim=True))
    grad_value = (weights * kept).transpose(2, 3) @ grad
    return of_scores @ key * scale, of_scores.transpose(2, 3) @ query * scale, grad_value


def repeated(query: Tensor, tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)


def flash(query: Any, key: Any, value: Any, dropout: float, causal: bool, debug: bool, *, scale: float) -> Any:
    assert query.shape[3] == key.shape[3] == value.shape[3]
    assert query.shape[3] % 8 == 0
    assert not debug
    assert not causal or query.shape[2] == key.shape[2]
    three = query, repeated(query, key), repeated(query, value)
    heads, lse, seed = attention(*three, None, dropout, causal, scale)
    return heads, lse, None, None, query.shape[2], key.shape[2], seed, torch.empty(0), torch.empty(0)


def flash_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    heads: Any,
    lse: Any,
    starts_q: None,
    starts_k: None,
    max_q: int,
    max_k: int,
    dropout: float,
    causal: bool,
    seed: Any,
    offset: Any,
    *,
    scale: float,
) -> Any:
    assert (starts_q, starts_k, max_q, max_k) == (None, None, query.shape[2], key.shape[2])
    assert lse.shape == query.shape[:3]
    assert offset.numel() == 0
    three = query, repeated(query, key), repeated(query, value)
    grad_q, *shared = attention_backward(grad, three, None, heads, lse, seed, (dropout, causal, scale))
    return grad_q, *(tensor.unflatten(1, (key.shape[1], -1)).sum(2) for tensor in shared)


def checked(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> None:
    """What the memory-efficient kernel wants of its inputs."""
    assert query.shape[1] == key.shape[1] == value.shape[1]
    assert query.shape[3] % 8 == 0
    if bias is not None:
        assert bias.shape == (*query.shape[:3], key.shape[2])
        assert bias.dtype == query.dtype
        assert bias.stride(3) == 1
        assert all(stride % 8 == 0 for stride in bias.stride()[:3])


def efficient(
    query: Any, key: Any, value: Any, bias: Any, want_lse: bool, dropout: float, causal: bool, *, scale: float
) -> Any:
    checked(query, key, value, bias)
    assert want_lse
    heads, lse, seed = attention(query, key, value, bias, dropout, causal, scale)
    rows = -lse.shape[2] % 32
    return heads, torch.nn.functional.pad(lse, (0, rows), value=torch.inf), seed, torch.zeros(())


def efficient_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    heads: Any,
    lse: Any,
    seed: Any,
    offset: Any,
    dropout: float,
    wanted: list[bool],
    causal: bool,
    *,
    scale: float,
) -> Any:
    checked(query, key, value, bias)
    assert wanted == [True, True, True, False]
    assert offset.shape == ()
    queries = query.shape[2]
    assert lse.shape[2] % 32 == 0
    assert lse.is_contiguous()
    assert lse[:, :, queries:].eq(torch.inf).all(), "rows of the padding have no weights"
    how = dropout, causal, scale
    three = query, key, value
    return *attention_backward(grad, three, bias, heads, lse[:, :, :queries], seed, how), None


STAND_INS = {Flash: Operators(flash, flash_backward), Efficient: Operators(efficient, efficient_backward)}


def stand_in(patched: pytest.MonkeyPatch, *kinds: Any) -> None:
    """Let tensors of the CPU run by the stand-ins of these kernels alone."""
    for kind in kinds:
        patched.setattr(kind, "operators", STAND_INS[kind])
        patched.setattr(kind, "device", "cpu")
        patched.setattr(kind, "dtypes", (FP64,))
    patched.setattr(stock_softmax, "KERNELS", tuple(kind() for kind in kinds))
    patched.setattr(cuda, "can_use_flash_attention", lambda params: params.enable_gqa)
    patched.setattr(cuda, "can_use_efficient_attention", lambda params: not params.enable_gqa)


@MANY
@given(
    sizes=SIZES,
    kind=MASKS,
    n=st.sampled_from([1.0, 0.25, 3.0]),
    as_tensor=st.booleans(),
    which=st.sampled_from([Flash, Efficient]),
    seed=st.integers(0, 999),
)
def test_values_and_gradients(
    sizes: tuple[int, ...], kind: str, n: float, as_tensor: bool, which: Any, seed: int
) -> None:
    batch, groups, share, queries, keys, width = sizes
    keys = queries if kind == "causal" else keys
    kind = "none" if which is Flash and kind not in ("none", "causal") else kind
    q, k, v = drawn(seed, (batch, groups * share, queries, width), *[(batch, groups, keys, width)] * 2)
    mask, causal, allowed = masked(kind, batch, queries, keys, seed)
    added = Masks(queries=queries, keys=keys, device=q.device, given=mask, causal=causal).additive(q.dtype)[0]
    given_n = torch.tensor([n]) if as_tensor else n
    with pytest.MonkeyPatch.context() as patched:
        stand_in(patched, which)
        got = kernel.softmax_n_attention(q, k, v, added, causal, 0.7, given_n)
        assert got is not None
        assert_equal(got, softmax_n_reference(q, k, v, allowed, 0.7, given_n), [q, k, v], seed + 1)


@pytest.mark.parametrize("which", [Flash, Efficient])
@pytest.mark.parametrize("width", [5, 8])
def test_dropped_weights(which: Any, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of softmax_n are dropped, and the backward pass drops the same ones."""
    stand_in(monkeypatch, which)
    q, k, v = drawn(0, (2, 4, 7, width), (2, 2, 9, width), (2, 2, 9, width))
    torch.manual_seed(3)
    got = kernel.softmax_n_attention(q, k, v, None, False, 0.7, 1.0, 0.4)
    torch.manual_seed(3)
    kept = kept_weights(torch.randint(2**31, (2,)), torch.Size((2, 4, 7, 9)), 0.4)
    scores = q @ repeated(q, k).transpose(2, 3) * 0.7
    weights = scores.exp() / (1 + scores.exp().sum(-1, keepdim=True))
    assert got is not None
    assert 0 < kept.eq(0).sum() < kept.numel()
    assert_equal(got, (weights * kept) @ repeated(q, v), [q, k, v], 1)


@pytest.mark.parametrize("which", [Flash, Efficient])
def test_a_gradient_that_is_no_memory_of_its_own(which: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of a sum is one number in place of all."""
    stand_in(monkeypatch, which)
    q, k, v = drawn(0, *[(1, 2, 4, 8)] * 3)
    got = kernel.softmax_n_attention(q, k, v, None, True, 0.7, 1.0)
    allowed = torch.ones(4, 4, dtype=torch.bool).tril()[None, None]
    wanted = softmax_n_reference(q, k, v, allowed, 0.7, 1.0)
    assert got is not None
    for own, other in zip(*(torch.autograd.grad(out.sum(), [q, k, v]) for out in (got, wanted)), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-10, atol=1e-10)


def test_the_first_kernel_that_takes_the_call_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    stand_in(monkeypatch, Flash, Efficient)
    for kind in (Flash, Efficient):
        forward = kind.forward

        def noted(self: Any, *given: Any, kind: Any = kind, forward: Any = forward) -> KernelOutput:
            ran.append(kind.__name__)
            return forward(self, *given)

        monkeypatch.setattr(kind, "forward", noted)
    q, k, v = drawn(0, (1, 2, 4, 8), (1, 2, 6, 8), (1, 2, 6, 8))
    mask = torch.zeros(1, 1, 1, 6, dtype=FP64)
    kernel.softmax_n_attention(q, k, v, None, False, 0.7, 1.0)
    kernel.softmax_n_attention(q, k, v, mask, False, 0.7, 1.0)
    kernel.softmax_n_attention(q, k[:, :, :4], v[:, :, :4], None, True, 0.7, 1.0)
    kernel.softmax_n_attention(q, k, v, None, True, 0.7, 1.0)
    assert ran == ["Flash", "Efficient", "Flash", "Efficient"]
    monkeypatch.setattr(cuda, "can_use_flash_attention", lambda params: False)
    kernel.softmax_n_attention(q, k, v, None, False, 0.7, 1.0)
    assert ran[4:] == ["Efficient"]
    monkeypatch.setattr(cuda, "can_use_efficient_attention", lambda params: False)
    assert kernel.softmax_n_attention(q, k, v, None, False, 0.7, 1.0) is None


CALLS = [("bert", None, 1.0), ("bert", "right", 0.5), ("llama", None, 0.5), ("llama", "left", 1.0)]


@pytest.mark.parametrize(("call", "name"), turns(CALLS, ["outeffhop", "sink", "sink+outeffhop"]), ids=str)
def test_a_whole_model(call: tuple[str, str | None, float], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    family, padded, strength = call
    model = perturb(patch_model(fresh(family), name, strength=strength))
    batch = zoo.inputs(family, batch=2, length=9, padded=padded)
    wanted = run_all(model, batch)
    stand_in(monkeypatch, Flash, Efficient)
    calls: list[int] = []
    apply = kernel._SoftmaxN.apply
    monkeypatch.setattr(kernel._SoftmaxN, "apply", lambda *given: calls.append(1) or apply(*given))
    assert_same(run_all(model, batch), wanted)
    assert len(calls) == model.config.num_hidden_layers


@pytest.mark.parametrize(("which", "masked"), [(Flash, False), (Efficient, False), (Efficient, True)])
def test_the_operators_take_what_they_are_given(which: Any, masked: bool) -> None:
    """PyTorch knows the shapes of these operators without a device: they accept our arguments, and lse is as we say."""
    kind = which()
    query = torch.empty(2, 4, 37, 10, device="meta", dtype=BF16)
    shared = torch.empty(2, 2, 41, 10, device="meta", dtype=BF16)
    mask = torch.empty(2, 1, 1, 41, device="meta", dtype=BF16) if masked else None
    three, ready = kind.prepared((query, shared, shared), mask)
    how = SdpaArgs(False, 0.1, 0.0)
    output = kind.forward(three, ready, how)
    assert output.heads.shape == (2, 4, 37, 16)
    assert output.lse.shape == (2, 4, 37 if which is Flash else 64)
    assert output.lse.dtype == FP32
    grads = kind.backward(torch.empty_like(output.heads), three, ready, output, how)
    assert [tensor.shape for tensor in grads] == [tensor.shape for tensor in three]


def setting(**given: Any) -> Setting:
    dtype = given.pop("dtype", BF16)
    return Setting(**{"device": "cuda", "dtypes": (dtype,) * 3, **given})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, Form.RESCALED),
        ({"dtype": FP16}, Form.RESCALED),
        ({"dtype": FP32}, Form.RESCALED),
        ({"dtype": FP64}, Form.ZERO_KEY),
        ({"dropout": True}, Form.RESCALED),
        ({"between": True}, Form.RESCALED),
        ({"compiling": True}, Form.ZERO_KEY),
        ({"recorded": True}, Form.ZERO_KEY),
        ({"dtypes": (BF16, BF16, FP32)}, Form.ZERO_KEY),
        ({"device": "mps"}, Form.ZERO_KEY),
        ({"device": "cpu"}, Form.RESCALED),
        ({"device": "cpu", "recorded": True}, Form.RESCALED),
        ({"device": "cpu", "dropout": True}, Form.ZERO_KEY),
    ],
)
def test_the_form(given: dict[str, Any], wanted: Form) -> None:
    assert softmax_n_form(setting(**given)) is wanted


def test_the_form_follows_the_version_and_the_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = torch.nn.attention.sdpa_kernel, torch.nn.attention.SDPBackend
    with switches[0](switches[1].EFFICIENT_ATTENTION):
        assert softmax_n_form(setting()) is softmax_n_form(setting(dtype=FP32)) is Form.RESCALED
    with switches[0](switches[1].FLASH_ATTENTION):
        assert softmax_n_form(setting()) is Form.RESCALED
        assert softmax_n_form(setting(dtype=FP32)) is Form.ZERO_KEY
    with switches[0](switches[1].MATH):
        assert softmax_n_form(setting()) is Form.ZERO_KEY
    with monkeypatch.context() as patched:
        patched.setattr(torch.version, "hip", "6.4")
        assert softmax_n_form(setting()) is Form.ZERO_KEY
    monkeypatch.setattr(Efficient, "operators", None)
    assert softmax_n_form(setting(dtype=FP32)) is Form.ZERO_KEY
    monkeypatch.setattr(Flash, "operators", None)
    assert softmax_n_form(setting()) is Form.ZERO_KEY


def test_operators_with_other_arguments_are_not_called() -> None:
    names = "_scaled_dot_product_efficient_attention", "query key value attn_bias"
    assert stock_softmax.operators(*names, "grad_out_ query") is None
    assert stock_softmax.operators("_no_such_operator", "", "") is None
    assert all(kind.operators is not None for kind in stock_softmax.KERNELS), "this version of PyTorch has them all"
