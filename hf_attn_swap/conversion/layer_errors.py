"""The loss `layers` of a distillation: each swapped layer against the original attention on the same input.

The error of a layer is the mean over rows of ||out - teacher||^2 / ||teacher||^2, where the norms are taken over the
real tokens of a row. The error of a row does not depend on the other rows of its batch, so two processes with half a
batch each train like one process. The teacher is the same module at strength 0, with frozen copies of the parameters
that train.
The method is this package's own, after attention transfer in linearised transformers; docs/mathematics.md, section
Distillation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache

from ..families import Site
from ..layer.swap import STOCK, Phase
from ..measuring.batches import read_by, refuse_other_tokens, token_mask
from ..measuring.divergence import relative_error
from ..wiring.install import Installation


class LayerErrors:
    """Compares the layers that run their variant with the original attention, on the model's own stream.

    Args:
        installation: the swaps of the model.
        originals: the values, before any training, of parameters that earlier trainings have changed.

    Raises:
        ValueError: a layer was retrained and its original values are not given, or all layers are at strength 0.
    """

    def __init__(self, installation: Installation, originals: Mapping[nn.Parameter, Tensor]) -> None:
        self.root = installation.root
        self.swapped = _swapped(installation, known=bool(originals))
        self.frozen = [_copies(site.container, originals) for site in self.swapped]

    @contextlib.contextmanager
    def watch(self, batch: dict[str, Any]) -> Iterator[list[Tensor]]:
        """Inside, every pass of the model adds the relative squared error of each swapped layer to the list."""
        refuse_other_tokens(self.root, [site.core for site in self.swapped], batch)
        errors: list[Tensor] = []
        with contextlib.ExitStack() as hooked:
            for site, frozen in zip(self.swapped, self.frozen, strict=True):
                hook = _comparison(frozen, read_by(site.core, batch), errors)
                hooked.callback(site.container.register_forward_hook(hook, with_kwargs=True).remove)
            yield errors


def _comparison(frozen: dict[str, Tensor], batch: dict[str, Any], errors: list[Tensor]) -> Any:
    """Make a hook that runs the module again as the teacher, and keeps the error."""

    def compare(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if kwargs.get(STOCK):
            return
        if any(isinstance(value, Cache) for value in (*args, *kwargs.values())):
            raise ValueError(
                "the loss 'layers' runs every swapped layer twice, so a cache would hold every token twice; leave the "
                "cache out of the batches (and prefix tuning out of the adapters)."
            )
        training = [submodule for submodule in module.modules() if submodule.training]
        with torch.no_grad():
            for submodule in training:
                submodule.training = False
            teacher = functional_call(module, frozen, args, {**kwargs, STOCK: True})
            for submodule in training:
                submodule.training = True
        ours = output if isinstance(output, Tensor) else output[0]
        theirs = teacher if isinstance(teacher, Tensor) else teacher[0]
        # Activation checkpointing computes a layer again without this hook, so it must not count what the error saves.
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            errors.append(relative_error(ours, theirs, token_mask(batch, theirs)))

    return compare


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _swapped(installation: Installation, *, known: bool) -> list[Site]:
    """The blocks that run their variant; a retrained layer and a model at strength 0 are refused.

    Args:
        installation: the swaps of the model.
        known: the values from before a training are known, so a retrained layer has an original.
    """
    layers = installation.layers()
    for layer in layers:
        index, swap = layer.number, layer.swap
        if swap.retrained and not known:
            raise ValueError(
                f"layer {index}: an earlier conversion changed its weights, so strength 0 is no longer the original "
                "attention; start again from the pretrained model."
            )
    running = [layer.site for layer in layers if layer.swap.phase != Phase.OFF]
    if not running:
        raise ValueError("all layers are at strength 0, the original itself; call set_strength(model, 1.0) first.")
    return running


def _copies(container: nn.Module, originals: Mapping[nn.Parameter, Tensor]) -> dict[str, Tensor]:
    """Return the teacher's values of the parameters of one attention block that train or have trained."""
    return {
        name: originals.get(parameter, parameter).detach().to(parameter.device, copy=True)
        for name, parameter in container.named_parameters()
        if parameter.requires_grad or parameter in originals
    }
