"""The losses of a distillation: what a student's pass lacks beside its teacher's.

    loss = w_1 KL(p* || p) + w_2 ||h - h*||^2 / ||h*||^2 + w_3 (the error of each swapped layer)

Each loss is a mean over rows: the first over a row's real tokens, the second over the layers, the third over the
swapped layers. The loss of a row does not depend on the other rows of its batch. The star marks the teacher.
docs/mathematics.md, section Distillation. Axes: B batch, L token, N token of all rows, E model width, V vocabulary (or
class).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache, PreTrainedModel

from ..layer.swap import STOCK, Phase
from ..measuring.batches import (
    Batch,
    gives_numbers,
    read_by,
    read_by_decoder,
    read_by_encoder,
    refuse_other_tokens,
    token_mask,
)
from ..measuring.divergence import divergence, divergence_of_numbers, relative_error
from ..measuring.lm_head import first_of, logits_of
from ..wiring.install import Installation


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The weights of the losses. A loss of weight 0 is not computed.

    Attributes:
        logits: of the divergence of the output distributions: of classes; of each label alone, if labels do not
            exclude each other; or of normal distributions around the outputs, for a regression.
        hidden: of the relative squared error of the hidden states.
        hidden_layers: the hidden states of which layers, "all" or the "last".
        layers: of the relative squared error of every attention layer that runs its variant, on the student's own
            stream.

    Raises:
        ValueError: a weight is negative, all weights are 0, another value is out of range, or a value belongs to a
            loss of weight 0.
    """

    logits: float = 1.0
    hidden: float = 0.0
    hidden_layers: Literal["all", "last"] = "all"
    layers: float = 0.0

    def __post_init__(self) -> None:
        weights = (self.logits, self.hidden, self.layers)
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise ValueError(f"the weights of the losses must be at least 0, and one must be above 0, got {weights}.")
        if self.hidden_layers not in ("all", "last"):
            raise ValueError(f"hidden_layers must be 'all' or 'last', got {self.hidden_layers!r}.")
        if self.hidden_layers != "all" and not self.hidden:
            raise ValueError("hidden_layers belongs to the loss 'hidden', whose weight is 0; leave hidden_layers out.")

    @property
    def all_states(self) -> bool:
        """True if the hidden states of every layer are compared."""
        return self.hidden > 0 and self.hidden_layers == "all"

    @property
    def words(self) -> str:
        """The weighted sum in words, for a record."""
        named = {"logits": self.logits, "hidden states": self.hidden, "swapped layers": self.layers}
        return " + ".join(f"{weight:g} x {name}" for name, weight in named.items() if weight)


@dataclass
class Pass:
    """What one pass showed.

    Attributes:
        output: of the model.
        caught: the last hidden states that the model below the head returned.
        errors: the relative squared error of every layer that runs its variant, of the student's pass.
    """

    output: Any
    caught: list[Tensor]
    errors: list[Tensor] = field(default_factory=list)

    @property
    def hidden(self) -> Tensor:
        """The last hidden states (B,L,E) of the model below the head; the output of a model without a head.

        Raises:
            ValueError: the model has a head, and no part of it returned the hidden states.
        """
        if self.caught:
            return self.caught[-1]
        if getattr(self.output, "logits", None) is not None:
            raise ValueError("the last hidden states of this model were not found; set hidden_layers to 'all'.")
        return first_of(self.output)


@dataclass(frozen=True)
class Comparison:
    """The two passes over one batch, and the models that made them.

    Attributes:
        student, teacher: the passes.
        batch: the inputs, without labels.
        root, teaching: the student and the teacher, without wrappers. They are the same model if it teaches itself.
        split: True if the logits are to be computed from the last hidden states, a chunk at a time.
    """

    student: Pass
    teacher: Pass
    batch: Batch
    root: PreTrainedModel
    teaching: PreTrainedModel
    split: bool

    def loss(self, losses: Losses) -> Tensor:
        """The weighted sum of the losses, ()."""
        terms = []
        if losses.logits:
            terms.append(losses.logits * self._divergence())
        if losses.hidden:
            terms.append(losses.hidden * self._hidden_error(losses.hidden_layers))
        if losses.layers:
            device = first_of(self.student.output).device
            terms.append(losses.layers * torch.stack([error.to(device) for error in self.student.errors]).mean())
        return sum(terms[1:], start=terms[0])

    def _divergence(self) -> Tensor:
        """The mean over rows of a row's mean divergence."""
        heads: dict[str, nn.Module] = {}
        if self.split:
            ours, theirs = self.student.hidden, self.teacher.hidden
            heads = {"head": self.root.get_output_embeddings(), "teacher_head": self.teaching.get_output_embeddings()}
        else:
            ours, theirs = logits_of(self.student.output), logits_of(self.teacher.output)
        if ours.shape != theirs.shape:
            raise ValueError(f"the teacher's outputs {tuple(theirs.shape)} are not the model's {tuple(ours.shape)}.")
        if gives_numbers(self.root):
            return divergence_of_numbers(self.root, ours, theirs)
        weight = _token_weights(self.batch, ours)
        return divergence(ours.reshape(-1, ours.shape[-1]), theirs.reshape(-1, theirs.shape[-1]), weight, **heads)

    def _hidden_error(self, layers: str) -> Tensor:
        """The mean over rows and layers of the relative squared error of the hidden states."""
        student, teacher = self.student, self.teacher
        if layers == "last":
            names = ["hidden_states"]
            ours, theirs = [student.hidden], [teacher.hidden]
        else:
            names = [
                name
                for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
                if getattr(student.output, name, None) is not None
            ]
            if not names:
                raise ValueError("the model gives no hidden states; set the loss 'hidden' to 0.")
            ours, theirs = (
                [state for name in names for state in outputs.output[name][1:]] for outputs in (student, teacher)
            )
        if [state.shape for state in ours] != [state.shape for state in theirs]:
            raise ValueError(
                f"the teacher's hidden states ({len(theirs)} of shape {tuple(theirs[0].shape)}) are not the model's "
                f"({len(ours)} of shape {tuple(ours[0].shape)}); set the loss 'hidden' to 0."
            )
        encoder, decoder = read_by_encoder(self.batch), read_by_decoder(self.batch)
        count = len(student.output["encoder_hidden_states"]) - 1 if "encoder_hidden_states" in names else 0
        errors = [
            relative_error(one, other.to(one.device), token_mask(encoder if place < count else decoder, other))
            for place, (one, other) in enumerate(zip(ours, theirs, strict=True))
        ]
        return torch.stack([error.to(errors[-1].device) for error in errors]).mean()


def _token_weights(batch: Batch, logits: Tensor) -> Tensor:
    """The weight of every token (N,): the same sum for each row, and 0 for padding."""
    rows = logits.shape[0]
    if logits.dim() == 2:
        return torch.full((rows,), 1 / rows, device=logits.device)
    real = token_mask(read_by_decoder(batch), logits).float()
    return (real / real.sum(1, keepdim=True).clamp_min(1) / rows).flatten()


class LayerErrors:
    """Compares the layers that run their variant with the original attention, on the model's own stream.

    Args:
        installation: the swaps of the model.
        originals: the values, before any training, of parameters that earlier trainings have changed.

    Raises:
        ValueError: a layer was retrained and its original values are not given.
    """

    def __init__(self, installation: Installation, originals: Mapping[nn.Parameter, Tensor]) -> None:
        self.root = installation.root
        running = [layer for layer in installation.layers() if layer.swap.phase != Phase.OFF]
        if any(layer.swap.retrained for layer in running) and not originals:
            raise ValueError(
                "an earlier conversion changed the weights of these layers, so strength 0 is no longer the original "
                "attention, and the loss 'layers' has nothing to compare with; start again from the pretrained model."
            )
        self.swapped = [layer.site for layer in running]
        self.frozen = [
            {
                name: originals.get(parameter, parameter).detach().to(parameter.device, copy=True)
                for name, parameter in site.container.named_parameters()
                if parameter.requires_grad or parameter in originals
            }
            for site in self.swapped
        ]

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
