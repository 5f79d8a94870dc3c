"""Training with rounding: the numbers of the integers, the gradients of no rounding, and the model afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from hf_attn_swap import patch_model
from hf_attn_swap.quantization import fake_w8a8, input_ranges, int8_static
from hf_attn_swap.quantization.points import Point, rounded_rows
from hf_attn_swap.quantization.straight_through import straight_through
from tests.contract.harness import batch_of, fresh, refused, swaps
from tests.harness.checkpointing import enable


def prepared(name: str) -> tuple[PreTrainedModel, dict[str, Any], dict[str, tuple[float, float]]]:
    model = patch_model(fresh(name, torch.float32), "outeffhop")
    batch = batch_of(name, torch.float32)
    return model, batch, input_ranges(model, [batch])


@pytest.mark.parametrize("name", ["bert", "llama", "vit"])
def test_it_computes_as_the_integers_do(name: str) -> None:
    model, batch, ranges = prepared(name)
    integers = int8_static(copy.deepcopy(model), ranges)
    with torch.no_grad():
        stock, wanted = model(**batch)[0], integers(**batch)[0]
        with straight_through(model, ranges):
            result = model(**batch)[0]
    assert (result - wanted).norm() < 1e-2 * (stock - wanted).norm()


def test_gradients_are_those_of_the_rounded_numbers() -> None:
    model, _, ranges = prepared("llama")
    path = next(path for path in ranges if path.endswith("up_proj"))
    linear = model.get_submodule(path)
    low, high = (end / 2 for end in ranges[path])  # so that some inputs lie outside
    seen: dict[str, torch.Tensor] = {}
    given = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)) * high
    x = given.clone().requires_grad_(True)
    with straight_through(model, {path: (low, high)}):
        out = linear(x)
        out.backward(weight := torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
        seen["weight"], seen["x"] = linear.parametrizations.weight.original.grad, x.grad
    rounded = Point("", low=low, high=high, seen=True).apply(given)
    inside = (given > low) & (given < high)
    assert inside.any()
    assert not inside.all()
    assert torch.allclose(seen["weight"], weight.T @ rounded, atol=1e-5)
    assert torch.allclose(seen["x"][inside], (weight @ rounded_rows(linear.weight.detach(), 0))[inside], atol=1e-5)
    assert seen["x"][given > high + (high - low) / 255].abs().max() == 0


@pytest.mark.parametrize("fails", [False, True])
def test_afterwards_the_model_is_as_before(fails: bool) -> None:
    model, batch, ranges = prepared("llama")
    parameters, names = list(model.parameters()), list(model.state_dict())
    classes = [type(module) for module in model.modules()]
    with torch.no_grad():
        before = model(**batch)[0]
    try:
        with straight_through(model, ranges):
            trained = [weight for weight in model.parameters() if weight.dim() > 1]
            assert all(any(weight is other for other in parameters) for weight in trained), "an optimizer finds them"
            if fails:
                raise RuntimeError("the end")
    except RuntimeError:
        assert fails
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == classes
    with torch.no_grad():
        assert torch.equal(model(**batch)[0], before)
    assert not any(isinstance(module, nn.Linear) and module._forward_pre_hooks for module in model.modules())
    assert swaps(model)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit"])
def test_the_papers_protocol_trains(name: str) -> None:
    """With gradients it computes the same numbers, every weight has a gradient, and steps follow a weight."""
    model = patch_model(fresh(name, torch.float32), "sink" if name != "vit" else "outeffhop")
    batch = batch_of(name, torch.float32)
    parameters, names = {id(parameter) for parameter in model.parameters()}, set(model.state_dict())
    with fake_w8a8(model, [batch]) as plain, torch.no_grad():
        wanted = model(**batch)[0]
    with fake_w8a8(model, [batch], gradients=True) as rounded:
        assert [(p.name, p.low, p.high) for p in rounded] == [(p.name, p.low, p.high) for p in plain]
        result = model(**batch)[0]
        assert torch.allclose(result, wanted, atol=1e-4)
        result.square().sum().backward()
        trained = [
            parameter
            for parameter in model.parameters()
            if parameter.grad is not None and parameter.grad.abs().max() > 0
        ]
        assert len(trained) > 0.6 * len(parameters)
        norm = next(module for module in model.modules() if type(module).__name__.endswith("Norm"))
        with torch.no_grad():
            before = norm.weight.clone()
            norm.parametrizations.weight.original.mul_(3)
            assert torch.allclose(norm.weight, 3 * before)
    assert {id(parameter) for parameter in model.parameters()} == parameters
    assert set(model.state_dict()) == names


def test_no_activation_checkpointing() -> None:
    """It computes a layer again in the backward pass, where the ranges of its calls are not known."""
    model = patch_model(fresh("bert", torch.float32), "sink")
    batch = batch_of("bert", torch.float32)
    enable(model)
    with fake_w8a8(model, [batch]):
        pass
    with (
        refused("under activation checkpointing", "switch the checkpointing off"),
        fake_w8a8(model, [batch], gradients=True),
    ):
        pass
