"""Derivatives beyond a training step: second derivatives, the transforms of `torch.func`, and a recorded training pass.

Each is compared with the readable formula, which runs when the caller wants the weights.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from hf_attn_swap import patch_model
from hf_attn_swap.core import masks
from tests import zoo
from tests.contract.cells import EVERY, SINGLES
from tests.contract.harness import fresh, perturb

EXACT = 1e-9
FAMILIES = ("bert", "llama")

BATCH, LENGTH = 2, 5
OF_STOCK = "_scaled_dot_product"  # part of the message of PyTorch where its own kernel has no such derivative



def model_of(family: str, name: str, strength: float = 1.0, **config: Any) -> Any:
    return perturb(patch_model(fresh(family, num_hidden_layers=2, **config), name, strength=strength)).eval()


def inner(model: Any, kinds: tuple[str, ...] = ("q", "k", "v")) -> dict[str, Tensor]:
    """The weights of the projections of queries, keys and values."""
    ends = tuple(f"{kind}_proj.weight" for kind in kinds) + tuple(
        f"{word}.weight" for word in ("query", "key", "value")
    )
    return {name: weight for name, weight in model.named_parameters() if name.endswith(ends)}


def loss_of(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> Tensor:
    return zoo.output(model(**batch, **kwargs)).square().mean()


def like(tensors: Any, seed: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each.shape, generator=generator, dtype=each.dtype) for each in tensors]


def named(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> list[Tensor]:
    """A Hessian-vector product by `autograd.grad` over `autograd.grad`."""
    weights = list(inner(model).values())
    first = torch.autograd.grad(loss_of(model, batch, **kwargs), weights, create_graph=True)
    product = sum((one * other).sum() for one, other in zip(first, like(weights), strict=True))
    return list(torch.autograd.grad(product, weights))


def plain(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> list[Tensor]:
    """The same by `backward(create_graph=True)` and `backward`."""
    weights = list(inner(model).values())
    model.zero_grad(set_to_none=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
        loss_of(model, batch, **kwargs).backward(create_graph=True)
    first = [weight.grad for weight in weights]
    model.zero_grad(set_to_none=True)
    sum((one * other).sum() for one, other in zip(first, like(weights), strict=True)).backward()
    return [weight.grad for weight in weights]


def assert_close(got: Any, wanted: Any) -> None:
    scale = max(float(each.abs().max()) for each in wanted)
    assert scale > 0
    for own, other in zip(got, wanted, strict=True):
        assert float((own - other).abs().max()) <= EXACT * scale


def only_sdpa(model: Any) -> bool:
    """True if all that keeps the model from a second derivative is the kernel of the stock function."""
    from hf_attn_swap.kernels.dispatch import Form, Setting

    for module in model.modules():
        if hasattr(module, "strength_value"):
            setting = Setting(device="cpu", dtypes=(torch.float64,) * 3, between=module.phase == "between")
            if module.form(setting) in (Form.SDPA, Form.STOCK):
                return True
            if module.replacement is not None and setting.between:
                return True
    return False


@contextlib.contextmanager
def math_kernel() -> Iterator[None]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield


@pytest.mark.parametrize("product", [named, plain])
@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", EVERY)
def test_second_derivatives(name: str, family: str, strength: float, product: Callable[..., list[Tensor]]) -> None:
    """Right, or the refusal of PyTorch's own kernel; and always right by PyTorch's plain kernel."""
    model = model_of(family, name, strength)
    batch = zoo.inputs(family, batch=BATCH, length=LENGTH, padded="left" if strength == 1 else None)
    wanted = product(model, batch, output_attentions=True) if not only_sdpa(model) else None
    with math_kernel():
        exact = named(model, batch, output_attentions=True)
        if product is named:
            assert_close(named(model, batch), exact)
    if wanted is None:
        with pytest.raises(RuntimeError, match=OF_STOCK):
            product(model, batch)
    else:
        assert_close(wanted, exact)
        assert_close(product(model, batch), exact)


@pytest.mark.parametrize("product", [named, plain])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["simpletron_resl", "modern_hopfield"])
def test_second_derivatives_of_the_forms_for_long_sequences(
    name: str, family: str, product: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hf_attn_swap.kernels import dispatch, linear

    monkeypatch.setattr(dispatch, "LONG", 8)
    monkeypatch.setattr(dispatch, "CHUNK", 4)
    monkeypatch.setattr(linear, "BLOCK", 4)
    model = model_of(family, name)
    batch = zoo.inputs(family, batch=BATCH, length=9, padded="left")
    assert_close(product(model, batch, use_cache=False) if family == "llama" else product(model, batch),
                 named(model, batch, output_attentions=True))


def per_sample(model: Any, batch: dict[str, Tensor], over_model: Callable[..., Any], **kwargs: Any) -> list[Tensor]:
    """What a transform gives for each example, with the loss as a function of the weights."""
    weights = inner(model)

    def loss(chosen: dict[str, Tensor], example: dict[str, Tensor]) -> Tensor:
        single = {key: value.unsqueeze(0) for key, value in example.items()}
        return zoo.output(functional_call(model, chosen, (), {**single, **kwargs})).square().mean()

    with warnings.catch_warnings():  # PyTorch has no rule of its own to run its kernel for many examples at once
        warnings.filterwarnings("ignore", "There is a performance drop")
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")  # PyTorch's forward mode calls it
        return over_model(loss, {name: weight.detach() for name, weight in weights.items()}, batch)


def of_grad(loss: Any, weights: Any, batch: Any) -> list[Tensor]:
    first = {key: value[0] for key, value in batch.items()}
    return list(grad(loss)(weights, first).values())


def of_vmap(loss: Any, weights: Any, batch: Any) -> list[Tensor]:
    return list(vmap(grad(loss), in_dims=(None, 0))(weights, batch).values())


def of_jvp(loss: Any, weights: Any, batch: Any) -> list[Tensor]:
    first = {key: value[0] for key, value in batch.items()}
    along = dict(zip(weights, like(weights.values()), strict=True))
    return list(jvp(lambda chosen: loss(chosen, first), (weights,), (along,)))


def of_jvp_of_grad(loss: Any, weights: Any, batch: Any) -> list[Tensor]:
    first = {key: value[0] for key, value in batch.items()}
    along = dict(zip(weights, like(weights.values()), strict=True))
    return list(jvp(grad(lambda chosen: loss(chosen, first)), (weights,), (along,))[1].values())


def of_jacrev(loss: Any, weights: Any, batch: Any) -> list[Tensor]:
    return list(jacrev(lambda chosen: torch.stack([loss(chosen, {k: v[i] for k, v in batch.items()})
                                                    for i in range(2)]))(weights).values())


def of_hessian(loss: Any, weights: Any, batch: Any) -> list[Tensor]:
    name, first = next(iter(weights)), {key: value[0] for key, value in batch.items()}
    part = weights[name][:1]

    def of_part(rows: Tensor) -> Tensor:
        return loss(weights | {name: torch.cat([rows, weights[name][1:]])}, first)

    return [hessian(of_part)(part)]


TRANSFORMS = [of_grad, of_vmap, of_jvp, of_jvp_of_grad, of_jacrev, of_hessian]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("strength", [1.0, 0.5])
@pytest.mark.parametrize("name", SINGLES)
@pytest.mark.parametrize("family", FAMILIES)
def test_transforms(family: str, name: str, strength: float, transform: Callable[..., list[Tensor]]) -> None:
    model = model_of(family, name, strength)
    batch = zoo.inputs(family, batch=BATCH, length=LENGTH)
    kwargs = {"use_cache": False} if family == "llama" else {}
    with math_kernel():
        wanted = per_sample(model, batch, transform, output_attentions=True, **kwargs)
    assert_close(per_sample(model, batch, transform, **kwargs), wanted)


class Alone(nn.Module):
    """A model that takes and gives one tensor, as a tracer wants it."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return zoo.output(self.model(input_ids=ids))


@pytest.mark.parametrize("name", SINGLES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_is_recorded_with_gradients(family: str, name: str) -> None:
    """`torch.jit.trace` without `no_grad`: the recorded program gives the values and the gradients of the model."""
    model = model_of(family, name, **({"use_cache": False} if family == "llama" else {}))
    alone = Alone(model)
    ids = zoo.inputs(family, batch=BATCH, length=LENGTH)["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer says what transformers' own code makes constant, and is old
        traced = torch.jit.trace(alone, (ids,), check_trace=False)
        assert "PythonOp" not in str(traced.inlined_graph)
    other = zoo.inputs(family, batch=BATCH, length=LENGTH, seed=2)["input_ids"]
    weights = list(inner(model).values())
    for each in (ids, other):
        got, wanted = traced(each), alone(each)
        torch.testing.assert_close(got, wanted, rtol=EXACT, atol=EXACT)
        assert_close(*(torch.autograd.grad(out.square().sum(), weights) for out in (got, wanted)))
