"""Second derivatives (`create_graph=True`): a kernel refuses them, and every other form has them.

A kernel that did neither would leave a part out without an error. The readable formula says what is right.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_attn_swap import functional, list_variants
from hf_attn_swap.kernels import dispatch
from hf_attn_swap.kernels.dispatch import Form, Setting
from tests import zoo
from tests.contract.harness import swaps

from .derivatives import BATCH, KINDS, LENGTH, assert_close, directions, loss_of, math_kernel, model_of, projections
from .drawn import drawn

LONGER = {"batch": 1, "length": 140}  # beyond one chunk of linear attention
KERNELS = {Form.RESCALED, Form.JOINED, Form.IN_PLACE, Form.BLOCKS, Form.WEIGHTED}


def first(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> list[Tensor]:
    loss = loss_of(model, batch, **kwargs)
    return list(torch.autograd.grad(loss, list(projections(model).values()), create_graph=True))


def second(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> list[Tensor]:
    """The product of the Hessian and fixed directions."""
    weights = list(projections(model).values())
    pairs = zip(first(model, batch, **kwargs), directions(weights), strict=True)
    return list(torch.autograd.grad(sum((slope * direction).sum() for slope, direction in pairs), weights))


@pytest.mark.parametrize("name", list_variants())
def test_a_kernel_refuses_and_other_forms_are_right(name: str) -> None:
    model, batch = model_of("llama", name, max_position_embeddings=200), zoo.inputs("llama", **LONGER)
    with math_kernel():  # PyTorch's fused kernel refuses as well
        wanted = second(model, batch, output_attentions=True)
    if swaps(model)[0].form(Setting(device="cpu", dtypes=(torch.float64,) * 3)) not in KERNELS:
        with math_kernel():
            assert_close(second(model, batch), wanted)
        return
    with pytest.raises(ValueError, match=r"second derivative.*output_attentions=True"):
        first(model, batch)  # named inputs
    with pytest.raises(ValueError, match=r"second derivative.*output_attentions=True"):
        loss_of(model, batch).backward(create_graph=True)


def test_the_form_that_never_holds_scores_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LONG", 8)
    model, batch = model_of("bert", "modern_hopfield"), zoo.inputs("bert", batch=BATCH, length=9, padded="left")
    assert_close(second(model, batch), second(model, batch, output_attentions=True))


@pytest.mark.parametrize(
    "normalizer", [functional.softmax_n, functional.sparsemax, functional.entmax15, functional.polynomial]
)
def test_the_formulas_have_second_derivatives(normalizer: Callable[[Tensor], Tensor]) -> None:
    assert torch.autograd.gradgradcheck(normalizer, drawn(1, (5, 6)), fast_mode=True, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_many_gradients_at_once(name: str) -> None:
    """`is_grads_batched` runs the backward pass inside `vmap`: the same as one gradient after the other."""
    model = model_of("bert", name)
    weights = list(projections(model).values())
    out = zoo.output(model(**zoo.inputs("bert", batch=BATCH, length=LENGTH)))
    grads = directions([out.expand(3, *out.shape)])[0]
    wanted = [torch.autograd.grad(out, weights, grad, retain_graph=True) for grad in grads]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        got = torch.autograd.grad(out, weights, grads, is_grads_batched=True)
    assert_close(got, [torch.stack(slopes) for slopes in zip(*wanted, strict=True)])
