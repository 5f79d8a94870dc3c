"""Distillation: trains a swapped model to give what the model gave before the swap, without labels.

The loss is a weighted sum of the losses in the table of `losses.py`. The loss of a row does not depend on the other
rows of its batch, so two processes with half a batch each train like one process. The teacher is by default the same
model at strength 0, with its adapters off.
The method is this package's own, after Hinton et al. (2015) and the published conversions (LoLCATs, MOHAWK, RADLADS);
docs/mathematics.md, section Distillation.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from ..layer.calibration import Calibration
from ..layer.swap import Phase
from ..measuring.batches import MASKS, without_labels
from ..measuring.lm_head import can_skip_logits, first_of, head_alone, last_hidden, logits_of
from ..patch import need_installation
from ..wiring.install import Installation
from .layer_errors import LayerErrors
from .losses import LAYERS, LOGITS, SPLIT, STATES, Comparison, Losses, Pass
from .parts import choose_trainable
from .preserve_training_state import configs_of
from .processes import zero_3
from .teacher import Teacher, is_sharded, note_retrained, refuse_frozen_copies
from .trainer import TrainerWithoutLabels


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
        losses: the weights of the losses.
        trainable: what trains: "all", "body" (all but the embeddings and the head), or any of "query", "key", "value",
            "output" (projections), "swap" (parameters of the variant and the calibration) and "vectors" (norms and
            biases of the body). None changes no `requires_grad`: in the wrapper of PEFT, the adapters train.
        kwargs: the other arguments of `Trainer`.

    Raises:
        ValueError: the model is not patched, is at strength 0, or was changed by a conversion and has no other teacher;
            the teacher has other outputs; `trainable` is unknown; nothing trains; or the data set is empty.
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
        if all(layer.swap.phase == Phase.OFF for layer in installation.layers()):
            raise ValueError("the model is at strength 0, the teacher itself; call set_strength(model, 1.0) first.")
        choose_trainable(model, trainable)
        self.teacher = teacher if isinstance(teacher, Teacher) else Teacher(model, teacher)
        self.needs = self.losses.needs
        self.errors = LayerErrors(installation, self.teacher.originals) if LAYERS in self.needs else None
        args = copy.copy(args) if args is not None else TrainingArguments()
        if args.include_num_input_tokens_seen == "no" and installation.root.main_input_name == "input_ids":
            args.include_num_input_tokens_seen = "all"
        super().__init__(model, args, parts_named=bool(trainable), **kwargs)
        refuse_frozen_copies(bool(self.teacher.frozen) and (self.is_fsdp_enabled or zero_3(args)))
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
        self._switch_off_dropout(model)
        unwrapped = self.accelerator.unwrap_model(model)
        with without_cache(unwrapped), without_cache(self.teacher.root):
            seen = self._compared(model, unwrapped, batch)
        with self.accelerator.autocast():
            loss = sum(weight * each.value(seen) for weight, each in self.losses.used)
        if return_outputs:
            return loss, {"loss": loss, "logits": first_of(seen.student.output).detach()}
        return loss

    def _compared(self, model: nn.Module, unwrapped: nn.Module, batch: dict[str, Any]) -> Comparison:
        """Run the teacher and the student."""
        wanted = dict(batch)
        if STATES in self.needs:
            wanted["output_hidden_states"] = True
        root = self.root
        teaching = self.teacher.model or self.teacher.root
        split = self._can_split(root, model) and self.split_head is not False
        if split:
            # The last token by index: for a slice of one token per row, torch would copy the whole head.
            wanted["logits_to_keep"] = torch.tensor([-1])
        with last_hidden(teaching) as caught:
            teacher = Pass(self.teacher(model, unwrapped, wanted), caught)
        with contextlib.ExitStack() as watched:
            caught = watched.enter_context(last_hidden(root))
            errors = [] if self.errors is None else watched.enter_context(self.errors.watch(batch))
            student = Pass(model(**wanted), caught, errors)
        if split and self.split_head is None:
            with self.accelerator.autocast():
                self.split_head = _split(teaching, teacher) and _split(root, student)
            if not self.split_head:  # something follows the head, such as a soft cap: take all logits from now on
                return self._compared(model, unwrapped, batch)
        return Comparison(student, teacher, batch, self.losses, root, teaching, split)

    def _can_split(self, root: PreTrainedModel, model: nn.Module) -> bool:
        """True if the logits can be computed from the last hidden states, a chunk at a time."""
        several = [root] if self.teacher.model is None else [root, self.teacher.model]
        if SPLIT not in self.needs or LOGITS in self.needs or not all(can_skip_logits(each) for each in several):
            return False
        if any(each.requires_grad for each in root.get_output_embeddings().parameters()):
            return False
        return not is_sharded(model)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`, with training steps for a fitted calibration that are relative to the size of its entries.

        The entries of a fitted map are near 1/100, where a training step of an adaptive optimiser is not small.
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

    def merge_and_unload(self) -> nn.Module:
        """Return the trained model, with PEFT's adapters merged into the weights."""
        return merge_adapters(self.accelerator.unwrap_model(self.model), need_installation(self.root))


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


def merge_adapters(model: nn.Module, installation: Installation) -> nn.Module:
    """Merge PEFT's adapters into the weights, for good. Returns the model without its wrapper."""
    merge = getattr(model, "merge_and_unload", None)
    if merge is None:
        return model
    note_retrained(installation)
    return cast(nn.Module, merge())


def _split(root: PreTrainedModel, seen: Pass) -> bool:
    """True if the logits can be computed from the last hidden states that were seen."""
    return bool(seen.caught) and head_alone(root, seen.hidden, logits_of(seen.output))


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
