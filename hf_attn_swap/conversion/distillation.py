"""Distillation: trains a swapped model to give what the model gave before the swap, without labels.

    loss = w_1 T^2 KL(p*_T || p_T) + w_2 ||h - h*||^2 / ||h*||^2 + w_3 (the error of each swapped layer)

Each term is a mean over rows: the first over a row's real tokens, the second over the layers, the third over the
swapped layers. The loss of a row does not depend on the other rows of its batch, so two processes with half a batch
each train like one process. The star marks the teacher: by default the same model at strength 0, with its adapters off.
The method is this package's own, after Hinton et al. (2015) and the published conversions (LoLCATs, MOHAWK, RADLADS);
docs/mathematics.md, section Distillation. Axes: B batch, L token, E model width, V vocabulary (or class).
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from ..layer.calibration import Calibration
from ..layer.swap import Phase
from ..measuring.batches import MASKS, gives_numbers, read_by_decoder, read_by_encoder, token_mask, without_labels
from ..measuring.divergence import divergence, divergence_of_numbers, relative_error
from ..measuring.head import first_of, head_alone, keeps_logits, last_hidden, logits_of
from ..patch import need_installation
from ..wiring.install import model_root
from .parts import PARTS, part_of
from .teacher import Teacher, is_sharded, note_retrained
from .trainer import TrainerWithoutLabels
from .transfer import layer_errors, without_cache

EVERYTHING, BODY = "all", "body"


@dataclass(frozen=True, kw_only=True)
class Losses:
    """The weights of the terms of the loss. A term of weight 0 is not computed.

    Attributes:
        logits: of the divergence of the output distributions: of classes; of each label alone, if labels do not
            exclude each other; or of normal distributions around the outputs, for a regression.
        temperature: T, which divides the logits.
        hidden: of the relative squared error of the hidden states.
        hidden_layers: the hidden states of which layers, "all" or the "last".
        layers: of the relative squared error of every swapped attention layer, on the student's own stream.

    Raises:
        ValueError: a weight is negative, all weights are 0, or another value is out of range.
    """

    logits: float = 1.0
    temperature: float = 1.0
    hidden: float = 0.0
    hidden_layers: Literal["all", "last"] = "all"
    layers: float = 0.0

    def __post_init__(self) -> None:
        weights = {name: getattr(self, name) for name in ("logits", "hidden", "layers")}
        if not all(0 <= weight < math.inf for weight in weights.values()) or not any(weights.values()):
            raise ValueError(f"the weights of the losses must be at least 0, and one must be above 0, got {weights}.")
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be above 0, got {self.temperature!r}.")
        if self.hidden_layers not in ("all", "last"):
            raise ValueError(f"hidden_layers must be 'all' or 'last', got {self.hidden_layers!r}.")


class DistillationTrainer(TrainerWithoutLabels):
    """A `Trainer` that teaches a swapped model what it gave before the swap; labels are not read.

    There is one model in memory. Dropout is off in the teacher and in the student: a student that learns with dropout
    what the teacher gives without becomes too sure of itself. docs/mathematics.md, section Distillation.

    Args:
        model: a model that is patched at a strength above 0, usually calibrated; or PEFT's wrapper around it.
        args: as for `Trainer`.
        teacher: another model that gives the targets, such as a fine-tuned control. None makes the model its own
            teacher: at strength 0, with PEFT's adapters off, and with frozen copies of whatever else trains. The
            `teacher` of an earlier trainer of this model goes on teaching what it taught before.
        losses: the weights of the terms.
        trainable: what trains: "all", "body" (all but the embeddings and the head), or any of "query", "key", "value",
            "output" (projections) and "swap" (parameters of the variant and the calibration). None changes no
            `requires_grad`: in the wrapper of PEFT, the adapters train.
        kwargs: the other arguments of `Trainer`.

    Raises:
        ValueError: the model is not patched, is at strength 0, or has merged layers and no other teacher; the teacher
            has other outputs; `trainable` is unknown; nothing trains; or the data set is empty.
    """

    def __init__(
        self,
        model: nn.Module,
        args: TrainingArguments | None = None,
        *,
        teacher: PreTrainedModel | Teacher | None = None,
        losses: Losses | None = None,
        trainable: Iterable[str] | str | None = None,
        **kwargs: Any,
    ) -> None:
        installation = need_installation(model)
        self.losses = losses or Losses()
        data = kwargs.get("train_dataset")
        if data is not None and hasattr(data, "__len__") and len(data) == 0:
            raise ValueError("the training data are empty; distillation needs a few thousand tokens without labels.")
        if all(layer.swap.phase == Phase.OFF for layer in installation.layers()) and not any(
            hasattr(callback, "strength") for callback in kwargs.get("callbacks") or ()
        ):
            raise ValueError("the model is at strength 0, the teacher itself; call set_strength(model, 1.0) first.")
        _choose(model, trainable)
        self.teacher = teacher if isinstance(teacher, Teacher) else Teacher(model, teacher)
        self.errors = layer_errors(installation) if self.losses.layers else None
        args = copy.copy(args) if args is not None else TrainingArguments()
        if args.include_num_input_tokens_seen == "no" and installation.root.main_input_name == "input_ids":
            args.include_num_input_tokens_seen = "all"
        super().__init__(model, args, parts_named=bool(trainable), **kwargs)
        self.split_head: bool | None = None  # True once the logits are known to be the head's output on hidden states

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a batch, (), and a dict of outputs if asked."""
        batch = without_labels(inputs)
        batch.pop("use_cache", None)
        if not any(isinstance(value, Tensor) and name not in MASKS for name, value in batch.items()):
            raise ValueError(
                f"the batch holds no inputs of the model, only {sorted(inputs)}; keep input_ids (or images)."
            )
        plain = self.accelerator.unwrap_model(model)
        self._switch_off_dropout(model)
        with without_cache(plain):
            student, teacher = self._outputs(model, plain, batch)
        with self.accelerator.autocast():
            loss = sum(self._terms(student, teacher, batch))
        if return_outputs:
            return loss, {"loss": loss, "logits": first_of(student.output).detach()}
        return loss

    def _outputs(self, model: nn.Module, plain: nn.Module, batch: dict[str, Any]) -> tuple[_Seen, _Seen]:
        """Run the teacher and the student."""
        wanted = dict(batch)
        if self.losses.hidden and self.losses.hidden_layers == "all":
            wanted["output_hidden_states"] = True
        root = self.root
        shortened = self._can_split(root, model) and self.split_head is not False
        if shortened:
            # The last token by index: for a slice of one token per row, torch would copy the whole head.
            wanted["logits_to_keep"] = torch.tensor([-1])
        teaching = self.teacher.model or root
        with last_hidden(teaching) as caught:
            teacher = _Seen(self.teacher(model, plain, wanted), caught)
        with contextlib.ExitStack() as watched:
            caught = watched.enter_context(last_hidden(root))
            errors = [] if self.errors is None else watched.enter_context(self.errors.watch(batch))
            student = _Seen(model(**wanted), caught, errors)
        if shortened and self.split_head is None:
            with self.accelerator.autocast():
                self.split_head = _split(teaching, teacher) and _split(root, student)
            if not self.split_head:  # something follows the head, such as a soft cap: take all logits from now on
                return self._outputs(model, plain, batch)
        return student, teacher

    def _can_split(self, root: PreTrainedModel, model: nn.Module) -> bool:
        """True if the logits can be computed from the last hidden states, a chunk at a time."""
        several = [root] if self.teacher.model is None else [root, self.teacher.model]
        if not self.losses.logits or not all(keeps_logits(each) for each in several):
            return False
        if any(each.requires_grad for each in root.get_output_embeddings().parameters()):
            return False
        return not is_sharded(model)

    def _terms(self, student: _Seen, teacher: _Seen, batch: dict[str, Any]) -> Iterator[Tensor]:
        losses = self.losses
        if losses.logits:
            yield losses.logits * self._divergence(student, teacher, batch)
        if losses.hidden:
            yield losses.hidden * _hidden_error(student, teacher, batch, losses.hidden_layers)
        if losses.layers:
            yield losses.layers * torch.stack([each.to(student.device) for each in student.errors]).mean()

    def _divergence(self, student: _Seen, teacher: _Seen, batch: dict[str, Any]) -> Tensor:
        """The mean over rows of a row's mean divergence."""
        heads: dict[str, nn.Module] = {}
        if self.split_head:
            root = self.root
            other = self.teacher.model or root
            ours, theirs = student.hidden, teacher.hidden
            heads = {"head": root.get_output_embeddings(), "teacher_head": other.get_output_embeddings()}
        else:
            ours, theirs = logits_of(student.output), logits_of(teacher.output)
        if ours.shape != theirs.shape:
            raise ValueError(f"the teacher's outputs {tuple(theirs.shape)} are not the model's {tuple(ours.shape)}.")
        if gives_numbers(self.root):
            return divergence_of_numbers(self.root, ours, theirs, self.losses.temperature)
        weight = _token_weights(batch, ours)
        return divergence(
            ours.reshape(-1, ours.shape[-1]),
            theirs.reshape(-1, theirs.shape[-1]),
            weight,
            temperature=self.losses.temperature,
            **heads,
        )

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`, with steps for a fitted calibration that are relative to the size of its entries.

        The entries of a fitted map are of the order of 1/100, where a step of an adaptive optimiser is not small.
        """
        new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if not new:
            return optimizer
        trained = self.model if model is None else model
        assert trained is not None
        for module in trained.modules():
            if isinstance(module, Calibration):
                _relative_steps(optimizer, [each for each in module.parameters() if each.requires_grad])
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model. A checkpoint in the middle of a training continues on this model, so no warning is needed."""
        with warnings.catch_warnings():
            if _internal_call:
                warnings.filterwarnings("ignore", "an adapter is saved alone")
            super().save_model(output_dir, _internal_call)

    def merged(self) -> nn.Module:
        """Return the trained model, with PEFT's adapters merged into the weights."""
        model: nn.Module = self.accelerator.unwrap_model(self.model)
        merge = getattr(model, "merge_and_unload", None)
        if merge is None:
            return model
        note_retrained(need_installation(self.root))
        return cast(nn.Module, merge())


@dataclass
class _Seen:
    """What one pass showed: the model's output, the last hidden states, and the errors of the swapped layers."""

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
        return first_of(self.output).device


def _split(root: PreTrainedModel, seen: _Seen) -> bool:
    """True if the logits can be computed from the last hidden states that were seen."""
    return bool(seen.caught) and head_alone(root, seen.hidden, logits_of(seen.output))


def _hidden_error(student: _Seen, teacher: _Seen, batch: dict[str, Any], which: str) -> Tensor:
    """The mean over rows and layers of the relative squared error of the hidden states."""
    if which == "last":
        names = ["hidden_states"]
        ours, theirs = [student.hidden], [teacher.hidden]
    else:
        names = [
            name
            for name in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
            if getattr(student.output, name, None) is not None
        ]
        ours, theirs = ([state for name in names for state in seen.output[name][1:]] for seen in (student, teacher))
    if [state.shape for state in ours] != [state.shape for state in theirs]:
        raise ValueError(
            f"the teacher's hidden states ({len(theirs)} of shape {tuple(theirs[0].shape)}) are not the model's "
            f"({len(ours)} of shape {tuple(ours[0].shape)}); set the loss 'hidden' to 0."
        )
    encoder, decoder = read_by_encoder(batch), read_by_decoder(batch)
    count = len(student.output["encoder_hidden_states"]) - 1 if "encoder_hidden_states" in names else 0
    errors = [
        relative_error(one, other.to(one.device), token_mask(encoder if place < count else decoder, other))
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True))
    ]
    return torch.stack([error.to(errors[-1].device) for error in errors]).mean()


def _token_weights(batch: dict[str, Any], logits: Tensor) -> Tensor:
    """The weight of every token (N,): the same sum for each row, and 0 for padding."""
    rows = logits.shape[0]
    if logits.dim() == 2:
        return torch.full((rows,), 1 / rows, device=logits.device)
    real = token_mask(read_by_decoder(batch), logits).float()
    return (real / real.sum(1, keepdim=True).clamp_min(1) / rows).flatten()


def _choose(model: nn.Module, trainable: Iterable[str] | str | None) -> None:
    """Freeze every parameter but the chosen ones."""
    names = (trainable,) if isinstance(trainable, str) else tuple(trainable or ())
    if names == (EVERYTHING,):
        model.requires_grad_(True)
    elif names == (BODY,):
        model.requires_grad_(True)
        head = model_root(model).get_output_embeddings()
        for module in model.modules():
            if isinstance(module, nn.Embedding) or module is head:
                module.requires_grad_(False)
    elif names:
        if not set(names) <= set(PARTS):
            raise ValueError(
                f"trainable: {names!r} must be some of {', '.join(PARTS)}, or {EVERYTHING!r} or {BODY!r} alone."
            )
        model.requires_grad_(False)
        for name in names:
            for module in part_of(model, name):
                module.requires_grad_(True)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("there is nothing to train; name parts in `trainable`, or add adapters.")


def _relative_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Give each of these parameters a group of its own, whose learning rate is relative to the size of its entries."""
    for parameter in parameters:
        for group in list(optimizer.param_groups):
            if not any(each is parameter for each in group["params"]):
                continue
            group["params"] = [each for each in group["params"] if each is not parameter]
            size = float(parameter.detach().float().square().mean().sqrt())
            kept = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
            kept |= {"lr": group["lr"] * min(size or 1.0, 1.0), "weight_decay": 0.0}
            optimizer.add_param_group({**kept, "params": [parameter]})
