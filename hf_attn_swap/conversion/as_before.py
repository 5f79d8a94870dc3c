"""What a training changes in a model beside the weights: modes, what requires gradients, a wrapped forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from ..wiring.install import model_root

LEFT = ("forward", "_original_forward", "_is_accelerate_prepared")  # what accelerate sets on a model that it trains


@contextlib.contextmanager
def as_before(model: nn.Module) -> Iterator[None]:
    """Afterwards, training modes, `requires_grad` and `forward` are as before, also after an error.

    What is new inside the model (a swap) has the mode of the module that holds it, and its parameters require
    gradients, as `patch_model` leaves them.
    """
    modes = {id(module): (module, module.training) for module in model.modules()}
    flags = {id(parameter): (parameter, parameter.requires_grad) for parameter in model.parameters()}
    holders = [module for module in {model, model_root(model)} if not any(name in vars(module) for name in LEFT)]
    try:
        yield
    finally:
        for module, training in modes.values():
            module.training = training
        for module, _ in modes.values():
            for child in module.children():
                if id(child) not in modes:
                    child.train(module.training)
        for parameter in model.parameters():
            parameter.requires_grad_(flags[id(parameter)][1] if id(parameter) in flags else True)
        for holder in holders:
            for name in LEFT:
                vars(holder).pop(name, None)


@contextlib.contextmanager
def own_precision(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes in the precision of its weights, also while a training runs it under autocast."""
    original = vars(model).get("_original_forward")
    if original is None:
        yield
        return
    wrapped = model.forward
    model.forward = original
    try:
        yield
    finally:
        model.forward = wrapped
