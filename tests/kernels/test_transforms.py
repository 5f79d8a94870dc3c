"""The transforms of `torch.func` on every variant, and a training pass that a tracer records.

Each is compared with the readable formula, which runs when the caller wants the weights.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacrev, jvp, vmap

from tests import zoo
from tests.contract.cells import SINGLES

from .derivatives import BATCH, BOTH, EXACT, FAMILIES, LENGTH, assert_close, inner, like, loss_of, math_kernel, model_of


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
    return list(
        jacrev(lambda chosen: torch.stack([loss(chosen, {k: v[i] for k, v in batch.items()}) for i in range(2)]))(
            weights
        ).values()
    )


def of_hessian(loss: Any, weights: Any, batch: Any) -> list[Tensor]:
    name, first = next(iter(weights)), {key: value[0] for key, value in batch.items()}
    part = weights[name][:1]

    def of_part(rows: Tensor) -> Tensor:
        return loss(weights | {name: torch.cat([rows, weights[name][1:]])}, first)

    return [hessian(of_part)(part)]


TRANSFORMS = [of_grad, of_vmap, of_jvp, of_jvp_of_grad, of_jacrev, of_hessian]


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize(("family", "strength"), BOTH)
@pytest.mark.parametrize("name", SINGLES)
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
    """`torch.jit.trace` without `no_grad`: the program gives the model's values and gradients, and can be saved."""
    model = model_of(family, name, **({"use_cache": False} if family == "llama" else {}))
    alone = Alone(model)
    ids = zoo.inputs(family, batch=BATCH, length=LENGTH)["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer says what transformers' own code makes constant, and is old
        traced = torch.jit.trace(alone, (ids,), check_trace=False)
        torch.jit.save(traced, io.BytesIO())  # a function of Python could not be saved
    other = zoo.inputs(family, batch=BATCH, length=LENGTH, seed=2)["input_ids"]
    weights = list(inner(model).values())
    for each in (ids, other):
        got, wanted = traced(each), alone(each)
        torch.testing.assert_close(got, wanted, rtol=EXACT, atol=EXACT)
        assert_close(*(torch.autograd.grad(out.square().sum(), weights) for out in (got, wanted)))


@pytest.mark.parametrize(("family", "strength"), BOTH)
@pytest.mark.parametrize("length", [LENGTH, 140])
@pytest.mark.parametrize("name", SINGLES)
def test_forward_mode_without_a_transform(name: str, length: int, family: str, strength: float) -> None:
    """`torch.autograd.forward_ad`: an operator of ours would lose the tangents without an error."""
    model = model_of(family, name, strength, max_position_embeddings=200)
    batch = zoo.inputs(family, batch=1, length=length)
    weights = inner(model)
    tangents = like(weights.values())
    with math_kernel(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
        first = torch.autograd.grad(loss_of(model, batch, output_attentions=True), list(weights.values()))
        wanted = sum((one * other).sum() for one, other in zip(first, tangents, strict=True))
    with forward_ad.dual_level(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")
        dual = {
            key: forward_ad.make_dual(weight.detach(), along)
            for (key, weight), along in zip(weights.items(), tangents, strict=True)
        }
        kwargs = {"use_cache": False} if family == "llama" else {}
        out = zoo.output(functional_call(model, dual, (), batch | kwargs)).square().mean()
        got = forward_ad.unpack_dual(out).tangent
    assert_close([got], [wanted])
