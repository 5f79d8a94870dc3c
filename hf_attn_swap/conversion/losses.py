"""The losses of a distillation, in one table: what each needs from the passes of teacher and student, and its value.

    loss = w_1 T^2 KL(p*_T || p_T) + w_2 ||h - h*||^2 / ||h*||^2 + w_3 (the error of each swapped layer)

Each loss is a mean over rows: the first over a row's real tokens, the second over the layers, the third over the
swapped layers. The loss of a row does not depend on the other rows of its batch. The star marks the teacher.
docs/mathematics.md, section Distillation. Axes: B batch, L token, N token of all rows, E model width, V vocabulary (or
class).

A new loss is one call of `register_loss`; `Losses(more={name: weight})` then uses it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import Cache, PreTrainedModel

from ..families import Site
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

# What a loss can need from the two passes. An output has only what the losses in use need.
SPLIT = "the logits, or the last hidden states from which the head computes them"
LOGITS = "the logits of every token"
STATES = "the hidden states of every layer"
LAYERS = "the errors of the swapped layers"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The weights of the losses. A loss of weight 0 is not computed.

    Attributes:
        logits: of the divergence of the output distributions: of classes; of each label alone, if labels do not
            exclude each other; or of normal distributions around the outputs, for a regression.
        temperature: T, which divides the logits.
        hidden: of the relative squared error of the hidden states.
        hidden_layers: the hidden states of which layers, "all" or the "last".
        layers: of the relative squared error of every attention layer that runs its variant, on the student's own
            stream.
        more: of losses that were added by `register_loss`, by their names.

    Raises:
        ValueError: a weight is negative, all weights are 0, a loss is unknown, another value is out of range, or a
            value belongs to a loss of weight 0.
    """

    logits: float = 1.0
    temperature: float = 1.0
    hidden: float = 0.0
    hidden_layers: Literal["all", "last"] = "all"
    layers: float = 0.0
    more: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if unknown := sorted({*self.more} - ({*LOSSES} - {*BUILT_IN})):
            raise ValueError(
                f"unknown losses in more: {', '.join(unknown)}; added are {', '.join(_added()) or 'none'}."
            )
        weights = self.weights
        if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
            raise ValueError(f"the weights of the losses must be at least 0, and one must be above 0, got {weights}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be above 0, got {self.temperature!r}.")
        if self.hidden_layers not in ("all", "last"):
            raise ValueError(f"hidden_layers must be 'all' or 'last', got {self.hidden_layers!r}.")
        if self.temperature != 1 and not self.logits:
            raise ValueError("temperature belongs to the loss 'logits', whose weight is 0; leave temperature out.")
        if self.hidden_layers != "all" and not self.hidden:
            raise ValueError("hidden_layers belongs to the loss 'hidden', whose weight is 0; leave hidden_layers out.")

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every loss, by its name in the table."""
        return {**{name: getattr(self, name) for name in BUILT_IN}, **self.more}

    @property
    def used(self) -> list[tuple[float, Loss]]:
        """The losses of a weight above 0, in the order of the table."""
        weights = self.weights
        return [(weights[name], loss) for name, loss in LOSSES.items() if weights.get(name)]

    @property
    def needs(self) -> set[str]:
        """What these losses need from the passes: some of `SPLIT`, `LOGITS`, `STATES` and `LAYERS`."""
        return {need for _, loss in self.used for need in loss.needs(self)}

    @property
    def words(self) -> str:
        """The weighted sum in words, for a record."""
        return " + ".join(f"{weight:g} x {loss.words}" for weight, loss in self.used)


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

    @property
    def device(self) -> torch.device:
        """Where the output is."""
        return first_of(self.output).device


@dataclass(frozen=True)
class Comparison:
    """The two passes over one batch, and the models that made them.

    Attributes:
        student, teacher: the passes.
        batch: the inputs, without labels.
        losses: the weights and values of the losses.
        root, teaching: the student and the teacher, without wrappers. They are the same model if it teaches itself.
        split: True if the logits are to be computed from the last hidden states, a chunk at a time.
    """

    student: Pass
    teacher: Pass
    batch: Batch
    losses: Losses
    root: PreTrainedModel
    teaching: PreTrainedModel
    split: bool


@dataclass(frozen=True, kw_only=True)
class Loss:
    """One loss.

    Attributes:
        name: its name in the table.
        words: its name in a sentence.
        needs: from the weights, what the loss needs from the passes: some of `SPLIT`, `LOGITS`, `STATES` and `LAYERS`.
        value: the loss of a batch, ().
    """

    name: str
    words: str
    needs: Callable[[Losses], tuple[str, ...]]
    value: Callable[[Comparison], Tensor]


LOSSES: dict[str, Loss] = {}
BUILT_IN = ("logits", "hidden", "layers")  # each has a field of its own in `Losses`


def register_loss(loss: Loss) -> Loss:
    """Add a loss to the table.

    Raises:
        ValueError: the name is taken.
    """
    if loss.name in LOSSES:
        raise ValueError(f"there is a loss {loss.name!r} already; choose another name.")
    LOSSES[loss.name] = loss
    return loss


def refuse_without_logits(losses: Losses, output: Any) -> None:
    """Refuse the loss `logits` for a model whose output has none.

    Raises:
        ValueError: it has none.
    """
    if losses.needs & {SPLIT, LOGITS}:
        logits_of(output)


def _added() -> list[str]:
    return [name for name in LOSSES if name not in BUILT_IN]


def _divergence(comparison: Comparison) -> Tensor:
    """The mean over rows of a row's mean divergence."""
    heads: dict[str, nn.Module] = {}
    if comparison.split:
        ours, theirs = comparison.student.hidden, comparison.teacher.hidden
        heads = {
            "head": comparison.root.get_output_embeddings(),
            "teacher_head": comparison.teaching.get_output_embeddings(),
        }
    else:
        ours, theirs = logits_of(comparison.student.output), logits_of(comparison.teacher.output)
    if ours.shape != theirs.shape:
        raise ValueError(f"the teacher's outputs {tuple(theirs.shape)} are not the model's {tuple(ours.shape)}.")
    temperature = comparison.losses.temperature
    if gives_numbers(comparison.root):
        return divergence_of_numbers(comparison.root, ours, theirs, temperature)
    weight = _token_weights(comparison.batch, ours)
    return divergence(
        ours.reshape(-1, ours.shape[-1]),
        theirs.reshape(-1, theirs.shape[-1]),
        weight,
        temperature=temperature,
        **heads,
    )


def _token_weights(batch: Batch, logits: Tensor) -> Tensor:
    """The weight of every token (N,): the same sum for each row, and 0 for padding."""
    rows = logits.shape[0]
    if logits.dim() == 2:
        return torch.full((rows,), 1 / rows, device=logits.device)
    real = token_mask(read_by_decoder(batch), logits).float()
    return (real / real.sum(1, keepdim=True).clamp_min(1) / rows).flatten()


def _hidden_error(comparison: Comparison) -> Tensor:
    """The mean over rows and layers of the relative squared error of the hidden states."""
    student, teacher = comparison.student, comparison.teacher
    if comparison.losses.hidden_layers == "last":
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
    encoder, decoder = read_by_encoder(comparison.batch), read_by_decoder(comparison.batch)
    count = len(student.output["encoder_hidden_states"]) - 1 if "encoder_hidden_states" in names else 0
    errors = [
        relative_error(one, other.to(one.device), token_mask(encoder if place < count else decoder, other))
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True))
    ]
    return torch.stack([error.to(errors[-1].device) for error in errors]).mean()


def _layer_errors(comparison: Comparison) -> Tensor:
    """The mean over rows and layers of the relative squared error of the swapped layers."""
    return torch.stack([error.to(comparison.student.device) for error in comparison.student.errors]).mean()


register_loss(Loss(name="logits", words="logits", needs=lambda _: (SPLIT,), value=_divergence))
register_loss(
    Loss(
        name="hidden",
        words="hidden states",
        needs=lambda losses: (STATES,) if losses.hidden_layers == "all" else (),
        value=_hidden_error,
    )
)
register_loss(Loss(name="layers", words="swapped layers", needs=lambda _: (LAYERS,), value=_layer_errors))


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
