"""The attention operators that `bench_operator.py` times, and the float64 references they are checked against.

Axes: B batch, H head, L token, D head width.
"""

from __future__ import annotations

import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_attn_swap.functional import simple_attention
from hf_attn_swap.kernels import linear
from hf_attn_swap.kernels.dispatch import Form, Setting, linear_form
from hf_attn_swap.kernels.softmax_n import softmax_n_attention

Operator = Callable[[Tensor, Tensor, Tensor, bool], Tensor]  # q, k, v (B,H,L,D) and whether it is causal


def scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """The scaled scores (B,H,L,L), masked if causal."""
    result = q @ k.mT * q.shape[-1] ** -0.5
    unseen = torch.ones(result.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return result.masked_fill(unseen, -torch.inf) if causal else result


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return torch.softmax(scores(q, k, causal), -1) @ v


def published(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """OutEffHop's softmax_1 as the paper's code has it, but without a gradient through the maximum, which is faster."""
    s = scores(q, k, causal)
    top = s.detach().amax(-1, keepdim=True)
    exponentials = (s - top).exp()
    return exponentials / ((-top).exp() + exponentials.sum(-1, keepdim=True)) @ v


def softmax_1(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax_1 as the variant computes it: by the fused kernel's log-sum-exp where possible, else by a zero key."""
    rescaled = softmax_n_attention(q, k, v, None, causal, q.shape[-1] ** -0.5, 1.0)
    if rescaled is not None:
        return rescaled
    more = (0, 0, 1, 0)
    heads = sdpa(F.pad(q, more) if causal else q, F.pad(k, more), F.pad(v, more), causal)
    return heads[:, :, 1:] if causal else heads


def simple(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Linear attention by the form that the variant takes for these tensors."""
    tokens = q.shape[2], k.shape[2]
    setting = Setting(device=q.device.type, dtypes=(q.dtype, k.dtype, v.dtype), causal=causal, tokens=tokens)
    if linear_form(setting) is Form.BLOCKS:
        return linear.attend(q, k, v, key_mask=None, length="true", past=None)
    return simple_attention(q, k, v, causal=causal)


OWN: dict[str, Operator] = {
    "sdpa": sdpa,
    "eager": eager,
    "softmax_1": softmax_1,
    "softmax_1 published": published,
    "simple": simple,
}
SLOW, FLASH = "flash-attention-softmax-n slow_attention_n", "flash-attention-softmax-n flash_attention_n"
NORMALIZERS = "hf-attention-normalizers softmax1_sdpa"


@contextmanager
def no_triton() -> Iterator[None]:
    """Inside the `with` block, triton cannot be imported."""
    kept = {name: sys.modules.pop(name) for name in ("triton",) if name in sys.modules}
    sys.modules["triton"] = None  # type: ignore[assignment]  # None makes the import fail
    try:
        yield
    finally:
        del sys.modules["triton"]
        sys.modules.update(kept)


def peers() -> dict[str, Operator]:
    """Published softmax_1 attentions that can be imported. Without CUDA, triton is hidden from the first package."""
    by_name: dict[str, Operator] = {}
    with suppress(ImportError), nullcontext() if torch.cuda.is_available() else no_triton():
        core: Any = importlib.import_module("flash_attention_softmax_n")
        by_name[SLOW] = lambda q, k, v, causal: core.slow_attention_n(q, k, v, is_causal=causal, softmax_n_param=1.0)
        by_name[FLASH] = lambda q, k, v, causal: core.flash_attention_n(q, k, v, is_causal=causal, softmax_n_param=1)
        warnings.filterwarnings("ignore", ".*sdp_kernel.*", FutureWarning)
    with suppress(ImportError):
        normalizers: Any = importlib.import_module("hf_attention_normalizers")
        normalizers.register_softmax1_attention_backends()
        forward, module = ALL_ATTENTION_FUNCTIONS["softmax1_sdpa"], torch.nn.Module()
        by_name[NORMALIZERS] = lambda q, k, v, causal: forward(module, q, k, v, None, is_causal=causal)[0].transpose(
            1, 2
        )
    return by_name


def quadratic(name: str, causal: bool) -> bool:
    """True if the operator holds a tensor of size L x L; in `flash_attention_n` that is the causal mask."""
    return name in ("eager", "softmax_1 published", SLOW, NORMALIZERS) or (name == FLASH and causal)


def reference(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The operator's correct output, computed from its definition."""
    if name == "simple":
        seen = torch.ones(q.shape[2], k.shape[2], dtype=q.dtype, device=q.device)
        seen = seen.tril() if causal else seen
        return (q @ k.mT * seen) @ v * seen.sum(-1, keepdim=True).rsqrt()
    weights = scores(q, k, causal).exp()
    return weights / (weights.sum(-1, keepdim=True) + (name not in ("sdpa", "eager"))) @ v


def tensors(shape: Sequence[int], device: str, dtype: torch.dtype) -> list[Tensor]:
    """Random q, k, v, and a random gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(tuple(shape), generator=generator).to(device, dtype) for _ in range(4)]
    return [*(tensor.requires_grad_() for tensor in made[:3]), made[3]]


def check(name: str, operator: Operator, shape: Sequence[int], causal: bool, device: str, dtype: torch.dtype) -> None:
    """Raise AssertionError unless output and gradients agree with the reference."""
    near = 1e-4 if dtype in (torch.float32, torch.float64) else 5e-2
    given = tensors(shape, device, dtype)
    exact = [tensor.detach().double().requires_grad_(tensor.requires_grad) for tensor in given]
    (q, k, v, grad), (exact_q, exact_k, exact_v, exact_grad) = given, exact
    result, wanted = operator(q, k, v, causal), reference(name, exact_q, exact_k, exact_v, causal)
    computed = (result, *torch.autograd.grad(result, given[:3], grad))
    right = (wanted, *torch.autograd.grad(wanted, exact[:3], exact_grad))
    for each, other in zip(computed, right, strict=True):
        torch.testing.assert_close(each.double(), other, atol=near, rtol=near, msg=lambda why: f"{name}: {why}")


def seconds(operator: Operator, given: list[Tensor], causal: bool, kind: str, calls: int = 1) -> float:
    """Mean seconds of one call; of "train", with the backward pass."""
    q, k, v, grad = given
    if grad.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.set_grad_enabled(kind == "train"):
        for _ in range(calls):
            out = operator(q, k, v, causal)
            if kind == "train":
                torch.autograd.grad(out, (q, k, v), grad)
    if grad.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls
