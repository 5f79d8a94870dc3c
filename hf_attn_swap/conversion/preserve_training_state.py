"""What a training changes in a model beside the weights, such as modes, configs and a wrapped forward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..wiring.install import model_root

LEFT = ("forward", "_original_forward", "_is_accelerate_prepared")  # what accelerate sets on a model that it trains


@contextlib.contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Afterwards the model is as before in all but its weights, also after an error.

    This means training modes, `requires_grad`, gradients, `forward`, `use_cache` in the configs, and activation
    checkpointing.

    What is new inside the model (a swap) has the mode of the module that holds it, and its parameters require
    gradients, as `patch_model` leaves them.
    """
    modes = {id(module): (module, module.training) for module in model.modules()}
    flags = {id(parameter): (parameter, parameter.requires_grad) for parameter in model.parameters()}
    without_gradient = [parameter for parameter in model.parameters() if parameter.grad is None]
    having: list[Any] = [module for module in model.modules() if hasattr(getattr(module, "config", None), "use_cache")]
    caching = [(module, module.config.use_cache) for module in having]
    checkpointed = _checkpoints(model)
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
            new = parameter.is_floating_point()  # 8-bit integers have no gradient
            parameter.requires_grad_(flags[id(parameter)][1] if id(parameter) in flags else new)
        for parameter in without_gradient:
            parameter.grad = None
        for module, use_cache in caching:
            module.config.use_cache = use_cache  # perhaps another config than before: a swap brings its own
        if _checkpoints(model) and not checkpointed:
            _without_checkpointing(model_root(model))
        for holder in holders:
            for name in LEFT:
                vars(holder).pop(name, None)


@contextlib.contextmanager
def preserve_training_flags(model: nn.Module) -> Iterator[None]:
    """Afterwards the same parameters require gradients as before."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of a model and of the models inside, each once."""
    configs = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config:
            configs[id(config)] = config
    return list(configs.values())


def _checkpoints(model: nn.Module) -> bool:
    """True if activation checkpointing is on."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _without_checkpointing(root: PreTrainedModel) -> None:
    """Switch activation checkpointing off, under the name that this transformers does not warn about."""
    new = hasattr(root, "activation_checkpointing_disable")
    getattr(root, f"{'activation' if new else 'gradient'}_checkpointing_disable")()
    root.disable_input_require_grads()


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
