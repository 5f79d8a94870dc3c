"""Linear attention over long sequences in half precision: sums of thousands of products are accumulated in fp32.

In fp16 a plain product overflows before the factor L^(-1/2); in bf16 a running sum of 8,192 products loses each new
one; and a chunk's own sum, taken as the difference of two running sums, loses what both have in common.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_attn_swap.functional import simple_attention
from hf_attn_swap.kernels import linear
from hf_attn_swap.variants.base import VARIANTS

LENGTH, WIDTH = 8192, 16
FORMS: dict[str, Callable[..., Tensor]] = {
    "plain": functools.partial(simple_attention, causal=False),
    "plain-causal": functools.partial(simple_attention, causal=True),
    "kernel-causal": linear.attend,
}
ERROR = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-17}  # of the largest entry


def drawn(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Queries, keys and values with a mean, as real ones have: their sums grow with the length."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 2, LENGTH, WIDTH)
    return [(torch.randn(shape, generator=generator) / 2 + 1).to(dtype).requires_grad_() for _ in range(3)]


def results(form: str, inputs: list[Tensor]) -> list[Tensor]:
    out = FORMS[form](*inputs, key_mask=None, length="true", past=None)
    weights = torch.linspace(0.5, 1.5, WIDTH).to(out.dtype).expand(out.shape)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_values_and_gradients_at_8192_tokens(dtype: torch.dtype, form: str) -> None:
    inputs = drawn(dtype)
    exact = results(form.replace("kernel", "plain"), [tensor.detach().double().requires_grad_() for tensor in inputs])
    got = results(form, inputs)
    assert float(exact[0].abs().max()) > 1000, "sums of about 100,000 before the factor, beyond fp16"
    for own, other in zip(got, exact, strict=True):
        assert own.dtype == dtype
        assert (own.double() - other).abs().max() <= ERROR[dtype] * other.abs().max()


def test_fp16_does_not_overflow_before_the_factor() -> None:
    """Each sum is 65,536 = 2^16, beyond fp16's 65,504; the factor 1 / sqrt(4096) brings the result to 1,024."""
    ones = torch.ones(1, 1, 4096, 4, dtype=torch.float16)
    for form in FORMS.values():
        out = form(2 * ones, 2 * ones, ones, key_mask=None, length="true", past=None)
        assert out[0, 0, -1].tolist() == [4 * 4 * 64.0] * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_products_under_any_mask_are_accumulated_wide(dtype: torch.dtype) -> None:
    name = next(name for name, cls in VARIANTS.items() if cls.replaces)
    cls = VARIANTS[name]
    variant = cls.__new__(cls)
    object.__setattr__(variant, "__dict__", {"options": cls.Options()})
    q = torch.full((1, 1, 1, 64), 60.0, dtype=dtype)
    k = torch.full((1, 1, 4096, 64), 60.0, dtype=dtype)
    allowed = torch.ones(1, 1, 1, 4096, dtype=torch.bool)
    products = variant.products(q, k, allowed)
    assert products.dtype == torch.float32
    torch.testing.assert_close(products, torch.full_like(products, 60 * 60 * 64 / 64))


def test_a_running_sum_of_chunks_does_not_cancel() -> None:
    """One huge chunk at the end must not touch what the chunks before it read."""
    q, k, v = (tensor.detach().clone() for tensor in drawn(torch.float32))
    k[:, :, -128:] *= 1e6
    small = simple_attention(*(tensor[:, :, : LENGTH - 128].double() for tensor in (q, k, v)), causal=True)
    got = simple_attention(q, k, v, causal=True)[:, :, : LENGTH - 128]
    assert (got - small).abs().max() <= 1e-5 * small.abs().max()
