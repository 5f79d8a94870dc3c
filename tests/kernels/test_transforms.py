"""The transforms of `torch.func`, forward mode, and a training pass that a tracer records: one variant per kernel.

Each is compared with the readable formula, which runs when the caller wants the weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from torch.func import functional_call, grad, jvp, vmap

from tests import zoo

from .derivatives import (  # fmt: skip
    BATCH,
    KINDS,
    LENGTH,
    assert_close,
    directions,
    math_kernel,
    model_of,
    projections,
)

CASES = [("llama", name, 1.0) for name in KINDS] + [("bert", "simpletron_resl", 0.5)]
NO_CACHE = {"llama": {"use_cache": False}, "bert": {}}


def quiet() -> Any:
    """PyTorch has no rule of its own to run its kernel for many examples at once, and calls what it deprecates."""
    warnings.filterwarnings("ignore", "There is a performance drop")
    warnings.filterwarnings("ignore", ".torch.jit.script. is deprecated")


def of_vmap(loss: Any, weights: Any, batch: Any) -> list[Tensor]:
    """The gradients of each example."""
    return list(vmap(grad(loss), in_dims=(None, 0))(weights, batch).values())


def of_jvp_of_grad(loss: Any, weights: Any, batch: Any) -> list[Tensor]:
    """The product of the Hessian of the first example and a direction."""
    example = {key: value[0] for key, value in batch.items()}
    along = dict(zip(weights, directions(weights.values()), strict=True))
    return list(jvp(grad(lambda chosen: loss(chosen, example)), (weights,), (along,))[1].values())


@pytest.mark.parametrize("transform", [of_vmap, of_jvp_of_grad])
@pytest.mark.parametrize(("family", "name", "strength"), CASES)
def test_transforms(family: str, name: str, strength: float, transform: Callable[..., list[Tensor]]) -> None:
    model, batch = model_of(family, name, strength), zoo.inputs(family, batch=BATCH, length=LENGTH)
    weights = {key: weight.detach() for key, weight in projections(model).items()}

    def of(**kwargs: Any) -> list[Tensor]:
        def loss(chosen: dict[str, Tensor], example: dict[str, Tensor]) -> Tensor:
            single = {key: value.unsqueeze(0) for key, value in example.items()}
            return (
                zoo.output(functional_call(model, chosen, (), {**single, **NO_CACHE[family], **kwargs})).square().mean()
            )

        return transform(loss, weights, batch)

    with warnings.catch_warnings():
        quiet()
        with math_kernel():
            wanted = of(output_attentions=True)
        assert_close(of(), wanted)
