"""Attention transfer: trains each swapped layer to give what the original attention gives, without labels.

loss = mean over swapped layers and rows of ||out - teacher||^2 / ||teacher||^2, where the norms are taken over the real
tokens of a row. The layer and its teacher read the same input: the output of the teachers below. The loss of a row does
not depend on the other rows of its batch, so two processes with half a batch each train like one process. The teacher
is the same module at strength 0, with frozen copies of the parameters that train.
The method is this package's own, after attention transfer in linearised transformers; docs/mathematics.md, section
Attention transfer.
Axes: B batch, L token, E model width.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache, TrainingArguments

from ..families import Site
from ..layer.swap import STOCK, Phase
from ..measuring.batches import read_by, refuse_other_tokens, token_mask, without_labels
from ..measuring.divergence import relative_error
from ..patch import need_installation
from ..wiring.install import Installation
from .parts import PARTS, site_part
from .preserve_training_state import configs_of
from .trainer import TrainerWithoutLabels

ADAPTERS = "adapters"


class AttentionTransferTrainer(TrainerWithoutLabels):
    """A `Trainer` whose loss compares every swapped layer with the original attention; labels are not read.

    Dropout is off, so that the layer and its teacher compute the same function. The trainer freezes every parameter
    that does not train, and does not unfreeze it at the end: call `requires_grad_` before a fine-tuning that follows.
    docs/mathematics.md, section Attention transfer.

    Args:
        model: a model that is patched at a strength above 0, usually 1; usually it is calibrated.
        args: as for `Trainer`.
        trainable: what trains: any of "query", "key", "value", "output" (projections) and "swap" (the variant's
            parameters and the calibration), or "adapters" alone (the parameters that PEFT left trainable).
        kwargs: the other arguments of `Trainer`.

    Raises:
        ValueError: the model is not patched, is at strength 0, has merged layers or is already sharded; a name in
            `trainable` is unknown; or nothing trains.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        trainable: Iterable[str] = ("query", "key", "swap"),
        **kwargs: Any,
    ) -> None:
        installation = need_installation(model)
        self.swapped = _swapped(installation)
        names = tuple([trainable] if isinstance(trainable, str) else trainable)
        _choose(model, self.swapped, names)
        self.errors = LayerErrors(installation.root, self.swapped, follow=True)
        super().__init__(model, args, parts_named=names != (ADAPTERS,), **kwargs)
        self.no_logits: dict[str, int] = {}
        if "logits_to_keep" in inspect.signature(installation.root.forward).parameters:
            self.no_logits = {"logits_to_keep": 1}  # logits over a vocabulary are costly, and the loss reads none

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the mean relative squared error of the swapped layers, and a dict of outputs if asked."""
        self._switch_off_dropout(model)
        batch = without_labels(inputs)
        batch.pop("use_cache", None)
        batch |= self.no_logits
        with self.errors.watch(batch) as losses, without_cache(model):
            outputs = model(**batch)
        loss = torch.stack([each.to(losses[-1].device) for each in losses]).mean()
        if return_outputs:
            return loss, {"loss": loss, "logits": outputs[0].detach()}
        return loss


class LayerErrors:
    """Compares swapped layers with the original attention on the same input.

    Args:
        root: the model.
        swapped: the attention blocks.
        follow: True if the model goes on with the teacher's output, False if it goes on with its own output.
        originals: the values, before any training, of parameters that earlier trainings have changed.
    """

    def __init__(
        self,
        root: nn.Module,
        swapped: list[Site],
        *,
        follow: bool,
        originals: Mapping[nn.Parameter, Tensor] | None = None,
    ) -> None:
        self.root = root
        self.swapped = swapped
        self.follow = follow
        self.frozen = [_copies(site.container, originals or {}) for site in swapped]

    @contextlib.contextmanager
    def watch(self, batch: dict[str, Any]) -> Iterator[list[Tensor]]:
        """Inside, every pass of the model adds the relative squared error of each swapped layer to the list."""
        refuse_other_tokens(self.root, [site.core for site in self.swapped], batch)
        errors: list[Tensor] = []
        with contextlib.ExitStack() as hooked:
            for site, frozen in zip(self.swapped, self.frozen, strict=True):
                hook = _comparison(frozen, read_by(site.core, batch), errors, self.follow)
                hooked.callback(site.container.register_forward_hook(hook, with_kwargs=True).remove)
            yield errors


def layer_errors(installation: Installation, originals: Mapping[nn.Parameter, Tensor]) -> LayerErrors:
    """The errors of the layers that run their variant, on the model's own stream.

    Args:
        installation: the swaps of the model.
        originals: the values, before any training, of parameters that earlier trainings have changed.

    Raises:
        ValueError: a layer is merged, was retrained without its original values, or all are at strength 0.
    """
    swapped = _swapped(installation, resting=True, known=bool(originals))
    return LayerErrors(installation.root, swapped, follow=False, originals=originals)


def _comparison(frozen: dict[str, Tensor], batch: dict[str, Any], losses: list[Tensor], follow: bool) -> Any:
    """Make a hook that runs the module again as the teacher, and keeps the loss."""

    def compare(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs.get(STOCK):
            return None
        if any(isinstance(each, Cache) for each in (*args, *kwargs.values())):
            raise ValueError(
                "attention transfer runs every swapped layer twice, so a cache would hold every token twice; leave "
                "the cache out of the batches (and prefix tuning out of the adapters)."
            )
        training = [each for each in module.modules() if each.training]
        with torch.no_grad():
            for each in training:
                each.training = False
            teacher = functional_call(module, frozen, args, {**kwargs, STOCK: True})
            for each in training:
                each.training = True
        ours = output if isinstance(output, Tensor) else output[0]
        theirs = teacher if isinstance(teacher, Tensor) else teacher[0]
        # Activation checkpointing computes a layer again without this hook, so it must not count what the error saves.
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            losses.append(relative_error(ours, theirs, token_mask(batch, theirs)))
        return teacher if follow else None

    return compare


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@contextlib.contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Inside, `use_cache` is False in every config of the model, so that the model makes no cache."""
    caching = [config for config in configs_of(model) if getattr(config, "use_cache", False)]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _swapped(installation: Installation, *, resting: bool = False, known: bool = False) -> list[Site]:
    """Return the swapped blocks, or refuse a merged layer, a retrained layer and a layer at strength 0.

    Args:
        installation: the swaps of the model.
        resting: layers at strength 0 are left out, as long as another layer runs its variant.
        known: the values from before a training are known, so a retrained layer has an original.
    """
    layers = installation.layers()
    running = [layer for layer in layers if layer.swap.phase != Phase.OFF]
    for layer in layers:
        index, swap = layer.number, layer.swap
        if swap.merged is not None:
            raise ValueError(
                f"layer {index}: its calibration was merged, so the original attention is gone; load the "
                "unmerged model."
            )
        if swap.retrained and not known:
            raise ValueError(
                f"layer {index}: an earlier conversion trained its weights, so strength 0 is no longer the original "
                "attention; start again from the pretrained model."
            )
        if swap.phase == Phase.OFF and not (resting and running):
            raise ValueError(
                f"layer {index} is at strength 0, the original itself; call set_strength(model, 1.0) first."
            )
    return [layer.site for layer in (running if resting and running else layers)]


def _choose(model: nn.Module, swapped: list[Site], trainable: tuple[str, ...]) -> None:
    """Freeze every parameter but the chosen ones."""
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        raise ValueError("the model is sharded already; pass the whole model, and let Trainer distribute it (DDP).")
    if trainable != (ADAPTERS,):
        if not trainable or not set(trainable) <= set(PARTS):
            raise ValueError(f"trainable: {trainable!r} must be some of {', '.join(PARTS)}, or {ADAPTERS!r} alone.")
        model.requires_grad_(False)
        for site in swapped:
            for part in trainable:
                site_part(site, part).requires_grad_(True)
    inside = {id(p) for site in swapped for p in site.container.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("there is nothing to train: the variant has no parameters; name projections in `trainable`.")


def _copies(container: nn.Module, originals: Mapping[nn.Parameter, Tensor]) -> dict[str, Tensor]:
    """Return the teacher's values of the parameters of one attention block that train or have trained."""
    return {
        name: originals.get(parameter, parameter).detach().to(parameter.device, copy=True)
        for name, parameter in container.named_parameters()
        if parameter.requires_grad or parameter in originals
    }
