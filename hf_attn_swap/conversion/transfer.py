"""Attention transfer: train swapped layers to give what the original attention gives, layer by layer, without labels.

loss = mean over swapped layers and rows of ||out - teacher||^2 / ||teacher||^2 over a row's real tokens, both on the
same input, which is the teacher's stream. A row's part does not depend on the rest of its batch, so that two processes
with half a batch each train as one does. The teacher is the same module at strength 0 with frozen copies of whatever
trains.
Ours, after attention transfer in linearised transformers; docs/mathematics.md, section Calibration and transfer.
Axes: B batch, L token, E model width.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache, Trainer, TrainingArguments

from ..core.swap import STOCK, Phase
from ..families import Site
from ..patch import need_installation, swappable
from ..wiring.install import Installation
from .batches import token_mask, without_labels
from .parts import PARTS, site_part

ADAPTERS = "adapters"


class AttentionTransferTrainer(Trainer):
    """A `Trainer` whose loss compares every swapped layer with the original attention; labels are not read.

    Dropout is off, so that both see the same. Everything that does not train is frozen for good: set
    `requires_grad_` again for the fine-tuning that follows.

    Args:
        model: patched at a strength above 0 (usually 1, and calibrated).
        trainable: what trains: any of "query", "key", "value", "output" (projections) and "swap" (the variant's
            parameters and the calibration), or "adapters" alone: what PEFT left trainable.
        kwargs: of `Trainer`.

    Raises:
        ValueError: the model is not patched, is at strength 0 or has merged layers, an unknown part, nothing to
            train, or a model that is already sharded.
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
        _choose(model, self.swapped, tuple([trainable] if isinstance(trainable, str) else trainable))
        self.frozen = [_copies(site.container) for site in self.swapped]
        if args is not None and args.ddp_find_unused_parameters is None:
            args = copy.copy(args)
            args.ddp_find_unused_parameters = False  # DDP would look for the losses in the model's output
        super().__init__(model, args, **kwargs)
        self.model_accepts_loss_kwargs = False  # ours is a mean: Trainer divides by the accumulation steps
        self.can_return_loss = True  # without labels there is still a loss to evaluate
        self.label_names: list[str] = []
        keeps = "logits_to_keep" in inspect.signature(installation.root.forward).parameters
        self.no_logits = {"logits_to_keep": 1} if keeps else {}  # a vocabulary's are costly, and nobody reads them

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Mean relative squared error of the swapped layers."""
        model.eval()
        batch = {key: value for key, value in without_labels(inputs).items() if key != "use_cache"} | self.no_logits
        losses: list[Tensor] = []
        handles = [
            site.container.register_forward_hook(_comparison(frozen, batch, losses), with_kwargs=True)
            for site, frozen in zip(self.swapped, self.frozen, strict=True)
        ]
        try:
            with _without_cache(model):
                outputs = model(**batch)
        finally:
            for handle in handles:
                handle.remove()
        loss = torch.stack([each.to(losses[-1].device) for each in losses]).mean()
        return (loss, {"loss": loss, "logits": outputs[0].detach()}) if return_outputs else loss


def relative_error(out_BLE: Tensor, teacher_BLE: Tensor, real_BL: Tensor) -> Tensor:
    """Mean over rows of ||out - teacher||^2 / ||teacher||^2 over real tokens, in fp32 at least."""
    wide = torch.promote_types(out_BLE.dtype, torch.float32)
    hidden_BL1 = ~real_BL[..., None]
    out, teacher = (each.to(wide).masked_fill(hidden_BL1, 0.0) for each in (out_BLE, teacher_BLE))
    error_B, size_B = (out - teacher).square().sum((1, 2)), teacher.square().sum((1, 2))
    return (error_B / size_B.clamp_min(torch.finfo(wide).tiny)).mean()


def _comparison(frozen: dict[str, Tensor], batch: dict[str, Any], losses: list[Tensor]) -> Any:
    """A hook that runs the module again as the teacher, notes the difference, and hands the teacher's output on."""

    def compare(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        if kwargs.get(STOCK):
            return None
        if any(isinstance(each, Cache) for each in (*args, *kwargs.values())):
            raise ValueError(
                "attention transfer runs every swapped layer twice, so a cache would hold every token twice; leave "
                "past_key_values out of the batches (and prefix tuning out of the adapters)."
            )
        with torch.no_grad():
            teacher = functional_call(module, frozen, args, {**kwargs, STOCK: True})
        ours, theirs = (each if isinstance(each, Tensor) else each[0] for each in (output, teacher))
        losses.append(relative_error(ours, theirs, token_mask(batch, theirs)))
        return teacher

    return compare


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Inside, the model makes no cache of its own, whatever its configs say."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    try:
        for config in caching:
            config.use_cache = False
        yield
    finally:
        for config in caching:
            config.use_cache = True


def _swapped(installation: Installation) -> list[Site]:
    usable = swappable(installation.root)
    sites = []
    for index, swaps in installation.swaps().items():
        if swaps[0].merged is not None:
            raise ValueError(f"layer {index}: its calibration was merged, so the original attention is gone.")
        if swaps[0].phase == Phase.OFF:
            raise ValueError(
                f"layer {index} is at strength 0, the original itself; call set_strength(model, 1.0) first."
            )
        sites.append(usable[index])
    return sites


def _choose(model: nn.Module, swapped: list[Site], trainable: tuple[str, ...]) -> None:
    """Freeze everything but what was chosen."""
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
        raise ValueError("there is nothing to train: the variant has no parameters; name projections in trainable.")


def _copies(container: nn.Module) -> dict[str, Tensor]:
    """What trains in one attention block, as it is now: the teacher's own."""
    return {name: p.detach().clone() for name, p in container.named_parameters() if p.requires_grad}
