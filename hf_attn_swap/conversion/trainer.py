"""A `Trainer` without labels and without dropout, for a teacher's targets; its checkpoints hold all that trains."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Trainer, TrainingArguments

from ..patch import need_installation
from .dropout import checkpointed_layers_without_dropout, switch_off_dropout
from .teacher import note_retrained, trains_the_original

BESIDE = "beside_adapters.safetensors"  # in a checkpoint: what trains and is no adapter


class TrainerWithoutLabels(Trainer):
    """A `Trainer` whose loss comes from a teacher, as a mean over rows. It trains without dropout, as the teacher runs.

    Args:
        model: a patched model.
        args: as for `Trainer`.
        parts_named: True if the caller has named the parts that train, so that frozen parameters are no mistake.
        kwargs: the other arguments of `Trainer`.

    Raises:
        ValueError: the model is not patched, or one process would use several GPUs.
    """

    def __init__(
        self, model: nn.Module, args: TrainingArguments | None = None, *, parts_named: bool, **kwargs: Any
    ) -> None:
        self.parts_named = parts_named
        self.root = need_installation(model).root
        if args is not None and args.n_gpu > 1:  # DataParallel's copies of the model share the swaps' state
            raise ValueError(
                f"this process sees {args.n_gpu} GPUs; start one process per GPU with accelerate launch, or set "
                "CUDA_VISIBLE_DEVICES to one of them."
            )
        if args is not None and args.ddp_find_unused_parameters is None:
            args = copy.copy(args)
            args.ddp_find_unused_parameters = False  # DDP searches the model's output, which has no losses
        super().__init__(model, args, **kwargs)
        self.model_accepts_loss_kwargs = False  # the loss is a mean, which Trainer divides by the accumulation steps
        self.can_return_loss = True  # without labels there is still a loss to evaluate
        self.label_names: list[str] = []

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`. The swaps note if strength 0 is no longer the original model, in checkpoints too."""
        self._refuse_flat_parameters()
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

    def _refuse_flat_parameters(self) -> None:
        """Refuse version 1 of FSDP where adapters and other parameters train: it keeps them in one flat tensor.

        Raises:
            ValueError: it is on.
        """
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if getattr(plugin, "fsdp_version", None) == 1 and self._beside_adapters():
            raise ValueError(
                "checkpoints of adapters under version 1 of FSDP lack what trains beside them, such as gates; take "
                "version 2 (fsdp_version: 2)."
            )

    def _switch_off_dropout(self, model: nn.Module) -> None:
        switch_off_dropout(self.accelerator.unwrap_model(model), swaps_warn=not self.parts_named)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`, with what trains beside adapters: PEFT saves its adapters alone."""
        super().save_model(output_dir, _internal_call)
        whole = {name: _whole(each).detach().cpu() for name, each in self._beside_adapters().items()}
        if self.args.should_save and whole:
            folder = Path(output_dir or self.args.output_dir or ".")
            folder.mkdir(parents=True, exist_ok=True)
            save_file({name: each.contiguous() for name, each in whole.items()}, folder / BESIDE)

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
                beside[name].copy_(_placed(value, beside[name]))

    def _beside_adapters(self) -> dict[str, nn.Parameter]:
        """What trains in a model with PEFT's adapters and is no adapter: the variant's own parameters.

        DeepSpeed keeps them itself: its checkpoints have all that trains.
        """
        model = self.accelerator.unwrap_model(self.model)
        if not isinstance(model, PeftModel) or self.is_deepspeed_enabled:
            return {}
        adapters = {
            id(parameter)
            for module in model.modules()
            if isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper))
            for parameter in module.parameters()
        }
        named = model.named_parameters()
        return {name: each for name, each in named if each.requires_grad and id(each) not in adapters}


def _whole(parameter: Tensor) -> Tensor:
    """All numbers of a parameter that FSDP2 may have split. Every process has to come here."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def _placed(value: Tensor, parameter: Tensor) -> Tensor:
    """A value split over processes as a parameter is."""
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)
