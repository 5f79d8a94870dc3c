"""Switches dropout off while a model learns what its teacher gives without dropout.

A model in evaluation mode has no dropout, and trains as well. But a layer of transformers that computes its
activations again in the backward pass does so in training mode alone, so such a layer stays in training mode, with its
own rates at 0; the modules inside are in evaluation mode. A swap has no dropout of its own, so it may stay in training
mode as well. There it warns if its parameters are frozen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..layer.swap import Swap


def switch_off_dropout(model: nn.Module, *, swaps_warn: bool) -> None:
    """Put a model that is in training mode into evaluation mode, all but layers with checkpointing.

    Args:
        model: the model, outside of any wrapper of DDP.
        swaps_warn: True leaves the swaps in training mode, so that they warn if their parameters are frozen.
    """
    if not model.training:
        return
    model.eval()
    for module in model.modules():
        checkpoints = isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
        if checkpoints or (swaps_warn and isinstance(module, Swap)):
            module.training = True


@contextlib.contextmanager
def checkpointed_layers_without_dropout(model: nn.Module) -> Iterator[None]:
    """Inside, the layers that can have activation checkpointing have their own rates of dropout at 0.

    The rates are the attributes whose names contain "drop", such as `activation_dropout` in a layer of OPT.
    """
    rates = [
        (module, name, rate)
        for module in model.modules()
        if isinstance(module, GradientCheckpointingLayer)
        for name, rate in vars(module).items()
        if "drop" in name and isinstance(rate, float)
    ]
    try:
        for module, name, _ in rates:
            setattr(module, name, 0.0)
        yield
    finally:
        for module, name, rate in rates:
            setattr(module, name, rate)
