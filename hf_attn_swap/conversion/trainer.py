"""Distillation: trains a swapped model to give what the model gave before the swap, without labels.

The loss is a weighted sum of the losses of `losses.py`. The loss of a row does not depend on the other
rows of its batch, so two processes with half a batch each train like one process.

The teacher is by default the student itself, without a second copy of its weights: every swap at strength 0, and what
trains as it was when the training began. PEFT adapters are switched off; other parameters that train have frozen
copies. Any other model of the same kind can be the teacher too.
The method is this package's own, after Hinton et al. (2015) and the published conversions (LoLCATs, MOHAWK, RADLADS);
docs/mathematics.md, section Distillation.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from ..layer.calibration import Calibration
from ..layer.swap import Phase, Swap
from ..measuring.batches import MASKS, evaluating, without_labels
from ..measuring.lm_head import can_skip_logits, first_of, head_alone, last_hidden, logits_of
from ..patch import need_installation
from ..text.bar import visible
from ..wiring.install import Installation
from .distributed import refuse_sharding
from .losses import Comparison, LayerErrors, Losses, Pass
from .trainable import choose_trainable, configs_of, preserve_training_flags

BESIDE = "beside_adapters.safetensors"  # in a checkpoint: what trains and is no adapter


# -- The teacher -------------------------------------------------------------------------------------------------------


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
            student: the student as the trainer runs it (DDP or compiled).
            unwrapped: the student without such a wrapper.
            batch: the keyword arguments of the model.
        """
        if self.model is not None:
            self.model.to(device=next(unwrapped.parameters()).device)  # type: ignore[call-arg]  # torch's own argument
            return self.model(**batch)
        with need_installation(self.root).stock(), evaluating(unwrapped), _without_adapters(unwrapped):
            if self.frozen:
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
    with preserve_training_flags(model), contextlib.ExitStack() as off:
        for module in model.modules():
            if isinstance(module, PeftModel):
                off.enter_context(module.disable_adapter())
            elif isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)) and not module.disable_adapters:
                module.enable_adapters(False)
                off.callback(module.enable_adapters, True)
        yield


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


# -- The student -------------------------------------------------------------------------------------------------------


class Bar(ProgressCallback):
    """The bar of a `Trainer`, with the loss beside the bar in place of printed lines.

    Args:
        name: the words in front of the bar.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draw the empty bar."""
        super().on_train_begin(args, state, control, **kwargs)  # type: ignore[no-untyped-call]  # transformers' own
        bar: Any = self.training_bar  # transformers types it as None
        if bar is not None:
            bar.set_description(self.name)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Write the loss beside the bar."""
        bar: Any = self.training_bar
        if bar is not None and "loss" in (logs or {}):
            bar.set_postfix_str(f"loss {float(logs['loss']):.3g}")


def quiet(trainer: Trainer, name: str, *, shown: bool) -> None:
    """Replace the lines that a `Trainer` prints by one bar, or by nothing."""
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    if shown and visible():
        trainer.add_callback(Bar(name))


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


class DistillationTrainer(Trainer):
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
            the teacher has other outputs; `trainable` is unknown; nothing trains; the data set is empty; or one process
            would use several GPUs.
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
        self.errors = LayerErrors(installation, self.teacher.originals) if self.losses.layers else None
        args = copy.copy(args) if args is not None else TrainingArguments()
        refuse_sharding(args, model)
        if args.n_gpu > 1:  # DataParallel's copies of the model share the swaps' state
            raise ValueError(
                f"this process sees {args.n_gpu} GPUs; start one process per GPU with accelerate launch, or set "
                "CUDA_VISIBLE_DEVICES to one of them."
            )
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = False  # DDP searches the model's output, which has no losses
        self.root = installation.root
        self.parts_named = bool(trainable)  # so frozen parameters are no mistake
        super().__init__(model, args, **kwargs)
        self.model_accepts_loss_kwargs = False  # the loss is a mean, which Trainer divides by the accumulation steps
        self.can_return_loss = True  # without labels there is still a loss to evaluate
        self.label_names: list[str] = []
        self.split_head: bool | None = None  # True once the logits are known to be the head's output on hidden states

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`. The swaps note if strength 0 is no longer the original model, in checkpoints too."""
        if not trains_the_original(cast(nn.Module, self.model)):
            return self._train(*args, **kwargs)
        before = note_retrained(need_installation(self.root))
        try:
            return self._train(*args, **kwargs)
        except BaseException:
            if not self.state.global_step:  # the training ended before its first training step
                note_retrained(need_installation(self.root), before)
            raise

    def _train(self, *args: Any, **kwargs: Any) -> Any:
        with checkpointed_layers_without_dropout(cast(nn.Module, self.model)):
            return super().train(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`, with what trains beside adapters: PEFT saves its adapters alone."""
        with warnings.catch_warnings():
            if _internal_call:  # a checkpoint in the middle of a training continues on this model
                warnings.filterwarnings("ignore", "an adapter is saved")
            super().save_model(output_dir, _internal_call)
        beside = self._beside_adapters()
        if self.args.should_save and beside:
            folder = Path(output_dir or self.args.output_dir or ".")
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in beside.items()}, folder / BESIDE)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """As in `Trainer`, with what trains beside adapters."""
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_beside_adapters(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        """As in `Trainer`, with what trains beside adapters."""
        super()._load_best_model()
        if self.state.best_model_checkpoint is not None:
            self._load_beside_adapters(self.state.best_model_checkpoint)

    def _load_beside_adapters(self, checkpoint: str) -> None:
        beside, path = self._beside_adapters(), Path(checkpoint) / BESIDE
        if not beside:
            return
        if not path.exists():
            raise ValueError(
                f"{checkpoint} has no {BESIDE}, which holds {next(iter(beside))} and others that train beside the "
                "adapters; remove this checkpoint, or start again."
            )
        with torch.no_grad():
            for name, value in load_file(path).items():
                beside[name].copy_(value)

    def _beside_adapters(self) -> dict[str, nn.Parameter]:
        """What trains in a model with PEFT's adapters and is no adapter: the variant's own parameters."""
        model = self.accelerator.unwrap_model(self.model)
        if not isinstance(model, PeftModel):
            return {}
        adapters = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper))
            for parameter in module.parameters()
        }
        named = model.named_parameters()
        return {
            name: parameter for name, parameter in named if parameter.requires_grad and id(parameter) not in adapters
        }

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
        unwrapped = self.accelerator.unwrap_model(model)
        switch_off_dropout(unwrapped, swaps_warn=not self.parts_named)
        with without_cache(unwrapped), without_cache(self.teacher.root):
            comparison = self._compared(model, unwrapped, batch)
        with self.accelerator.autocast():
            loss = comparison.loss(self.losses)
        if return_outputs:
            return loss, {"loss": loss, "logits": first_of(comparison.student.output).detach()}
        return loss

    def _compared(self, model: nn.Module, unwrapped: nn.Module, batch: dict[str, Any]) -> Comparison:
        """Run the teacher and the student."""
        wanted = dict(batch)
        if self.losses.all_states:
            wanted["output_hidden_states"] = True
        root = self.root
        teaching = self.teacher.model or self.teacher.root
        split = self._can_split(root) and self.split_head is not False
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
        return Comparison(student, teacher, batch, root, teaching, split)

    def _can_split(self, root: PreTrainedModel) -> bool:
        """True if the logits can be computed from the last hidden states, a chunk at a time."""
        models = [root] if self.teacher.model is None else [root, self.teacher.model]
        if not self.losses.logits or not all(map(can_skip_logits, models)):
            return False
        return not any(parameter.requires_grad for parameter in root.get_output_embeddings().parameters())

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
                _relative_steps(optimizer, [parameter for parameter in module.parameters() if parameter.requires_grad])
        return optimizer

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


def _split(root: PreTrainedModel, shown: Pass) -> bool:
    """True if the logits can be computed from the last hidden states that were seen."""
    return bool(shown.caught) and head_alone(root, shown.hidden, logits_of(shown.output))


def _relative_steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> None:
    """Give each of these parameters a group of its own, whose learning rate is relative to the size of its entries."""
    for parameter in parameters:
        for group in list(optimizer.param_groups):
            if not any(other is parameter for other in group["params"]):
                continue
            group["params"] = [other for other in group["params"] if other is not parameter]
            size = float(parameter.detach().float().square().mean().sqrt())
            kept = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
            kept |= {"lr": group["lr"] * min(size or 1.0, 1.0), "weight_decay": 0.0}
            optimizer.add_param_group({**kept, "params": [parameter]})
