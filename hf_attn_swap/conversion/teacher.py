"""The teacher of a distillation: the model as it was before the swap, without a second copy of its weights.

By default, the teacher is the student itself: every swap at strength 0, and what trains as it was when the training
began. PEFT adapters are switched off; other parameters that train have frozen copies. Any other model of the same kind
can be the teacher too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from ..layer.swap import Swap
from ..measuring.batches import evaluating
from ..patch import need_installation
from ..wiring.install import Installation
from .distributed import is_sharded


class Teacher:
    """Computes the outputs that a student should have.

    Args:
        student: a patched model, with or without adapters, in which everything that trains requires gradients.
        model: another model as the teacher; None makes the student its own teacher.
        originals: the values, before any training, of parameters that earlier trainings have changed. With them the
            teacher is the model from before these trainings.

    Raises:
        ValueError: the student is no longer the original at strength 0, or the other model does not fit the student.
    """

    def __init__(
        self,
        student: nn.Module,
        model: PreTrainedModel | None = None,
        originals: Mapping[nn.Parameter, torch.Tensor] | None = None,
    ) -> None:
        installation = need_installation(student)
        self.root = installation.root
        self.model = model
        self.originals = dict(originals or {})
        self.frozen: dict[str, torch.Tensor] = {}
        if model is not None:
            check_teacher(self.root, model)
            model.eval().requires_grad_(False)
            return
        for layer in installation.layers():
            if layer.swap.retrained and not self.originals:
                raise ValueError(
                    f"layer {layer.number}: an earlier conversion changed its weights, so strength 0 is no longer the "
                    "original; pass the original model as teacher."
                )
        unused = _unused_at_strength_0(student)
        self.frozen = {
            name: self.originals.get(parameter, parameter).detach().to(parameter.device, copy=True)
            for name, parameter in student.named_parameters()
            if (parameter.requires_grad or parameter in self.originals) and id(parameter) not in unused
        }

    @torch.no_grad()
    def __call__(self, student: nn.Module, unwrapped: nn.Module, batch: dict[str, Any]) -> Any:
        """The teacher's outputs for a batch.

        Args:
            student: the student as the trainer runs it (DDP, FSDP or compiled).
            unwrapped: the student without such a wrapper.
            batch: the keyword arguments of the model.

        Raises:
            ValueError: the student is split over several processes, and weights of the model itself train.
        """
        if self.model is not None:
            self.model.to(device=next(unwrapped.parameters()).device)  # type: ignore[call-arg]  # torch's own argument
            return self.model(**batch)
        with need_installation(self.root).stock(), evaluating(unwrapped), _without_adapters(unwrapped):
            if self.frozen:
                refuse_frozen_copies(is_sharded(unwrapped))
                return functional_call(unwrapped, self.frozen, (), batch)
            return student(**batch)


def trains_the_original(model: nn.Module) -> bool:
    """True if parameters train that the model uses at strength 0, so that the training changes the original."""
    others = _unused_at_strength_0(model)
    return any(parameter.requires_grad and id(parameter) not in others for parameter in model.parameters())


def note_retrained(installation: Installation, retrained: bool = True) -> bool:
    """Note in every swap and in the config whether strength 0 is no longer the original model.

    Returns:
        What was noted before.
    """
    every = [swap for layer in installation.layers() for swap in layer.copies]
    before = any(swap.retrained for swap in every)
    for swap in every:
        swap.retrained = retrained
    installation.refresh()
    return before


def refuse_frozen_copies(sharded: bool) -> None:
    """Refuse weights that are split over processes: FSDP puts them back instead of the frozen copies.

    Raises:
        ValueError: the weights are split.
    """
    if sharded:
        raise ValueError(
            "frozen copies cannot take the place of sharded weights (FSDP, DeepSpeed ZeRO-3), so the teacher would "
            "change with the student; train adapters (PEFT), or pass another model as teacher."
        )


def _unused_at_strength_0(model: nn.Module) -> set[int]:
    """The ids of the parameters that the teacher does not use: those of the swaps, and those of PEFT's adapters."""
    unused: set[int] = set()
    for module in model.modules():
        if isinstance(module, (Swap, ModulesToSaveWrapper)):
            unused |= {id(parameter) for parameter in module.parameters()}
        elif isinstance(module, BaseTunerLayer):
            adapters = [getattr(module, name) for name in module.adapter_layer_names]
            unused |= {
                id(parameter)
                for adapter in adapters
                if isinstance(adapter, nn.Module)
                for parameter in adapter.parameters()
            }
    return unused


@contextlib.contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, PEFT's adapters are off, in its wrapper or put into the model itself (`model.add_adapter`).

    What requires gradients stays as it is: PEFT would switch all adapters on.
    """
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    with contextlib.ExitStack() as off:
        off.callback(_set_flags, flags)
        for module in model.modules():
            if isinstance(module, PeftModel):
                off.enter_context(module.disable_adapter())
            elif isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)) and not module.disable_adapters:
                module.enable_adapters(False)
                off.callback(module.enable_adapters, True)
        yield


def _set_flags(flags: list[tuple[nn.Parameter, bool]]) -> None:
    """Let parameters require gradients, or not, as noted before."""
    for parameter, flag in flags:
        parameter.requires_grad_(flag)


def check_teacher(student: PreTrainedModel, teacher: Any) -> None:
    """Refuse a teacher whose outputs have other sizes.

    Raises:
        ValueError: the teacher is no transformers model, or has another vocabulary or other classes.
    """
    if not isinstance(teacher, PreTrainedModel):
        raise ValueError(f"the teacher must be a transformers model, got {type(teacher).__name__}.")
    for name in ("vocab_size", "num_labels"):
        ours, theirs = getattr(student.config, name, None), getattr(teacher.config, name, None)
        if ours != theirs:
            raise ValueError(
                f"the teacher has {name} = {theirs} and the model has {ours}; choose a teacher with the same outputs."
            )
