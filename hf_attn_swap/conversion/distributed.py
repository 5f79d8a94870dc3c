"""What the processes of one conversion, started by accelerate or torchrun, decide alike.

Each process measures by itself, and two devices may round differently. A choice that follows from a figure, such as the
end of a training, has to be the same in all of them: otherwise one process waits for ever for the others.

With FSDP2, a copy of the student trains, split over the processes, beside the whole student of each process. The other
steps of a conversion read and write whole weights, so each process keeps the whole model. While the copy trains, the
whole model has its first values and teaches; then it gets what the copy has learnt. Weights that do not train are the
same tensors in both until FSDP2 takes its shard of them.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.training_args import ParallelMode

from .snapshot import copied, put
from .teacher import is_sharded

T = TypeVar("T")
WHOLE = (
    "convert works on whole weights, and {}; start it with accelerate launch --use_fsdp --fsdp_version 2, which splits "
    "the training alone, or with --multi_gpu, or on one process with low_memory=True (--low-memory)."
)


def broadcast_from_rank0(value: T, args: TrainingArguments) -> T:
    """The value that the first process has. Every process has to come here."""
    if args.world_size == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]


def zero_3(args: TrainingArguments) -> bool:
    """True if DeepSpeed splits the weights over processes."""
    plugin = getattr(args, "deepspeed_plugin", None)
    return plugin is not None and plugin.zero_stage == 3


def how_to_split(args: TrainingArguments, model: nn.Module | None = None) -> FullyShardedDataParallelPlugin | None:
    """How FSDP2 splits the trainings of a conversion over processes; None if each process trains the whole model.

    Of FSDP's settings, `reshard_after_forward` and the mixed precision are followed.

    Raises:
        ValueError: version 1 of FSDP or DeepSpeed ZeRO-3 is on, FSDP2 is on with a setting or a model that it cannot
            be right for, or the model is split already: the steps of a conversion read and write whole weights.
    """
    if zero_3(args):
        raise ValueError(WHOLE.format("DeepSpeed ZeRO-3 splits them over processes"))
    if model is not None and is_sharded(model):
        raise ValueError(WHOLE.format("FSDP or DeepSpeed ZeRO-3 has split those of this model already"))
    if not args.fsdp and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    plugin = FullyShardedDataParallelPlugin(**(getattr(args, "fsdp_plugin_args", None) or {}))
    if plugin.fsdp_version != 2:
        raise ValueError(WHOLE.format("version 1 of FSDP splits them over processes"))
    if args.parallel_mode is not ParallelMode.DISTRIBUTED:
        raise ValueError("FSDP splits a training over processes, and this is one; start it with accelerate launch.")
    for name, on in (
        ("offload_params (cpu_offload)", isinstance(plugin.cpu_offload, CPUOffloadPolicy)),
        ("activation_checkpointing", plugin.activation_checkpointing),
        ("ignored_modules", plugin.ignored_modules),
    ):
        if on:
            raise ValueError(
                f"convert cannot follow FSDP's setting {name}; leave it out. For less memory, low_memory=True "
                "(--low-memory) trains adapters and computes activations again."
            )
    if model is not None:
        refuse_for_fsdp(model, mixed=args.bf16 or args.fp16)
    return plugin


EMBEDDINGS = ("get_input_embeddings", "get_output_embeddings")


class SplitCopy:
    """A copy of a student, which a trainer splits.

    Args:
        student: the whole student, in which what trains requires gradients.
        originals: the values, before any training, of the parameters that have changed or will.
        teaches: True if the student teaches the copy: until `gather`, it has its first values.

    Attributes:
        model: the copy.
        originals: the same values, by the parameters of the copy before it is split.
    """

    def __init__(self, student: nn.Module, originals: Mapping[nn.Parameter, Tensor], *, teaches: bool) -> None:
        parameters = list(student.parameters())
        self.trained = [parameter for parameter in parameters if parameter.requires_grad]
        self.first = dict(originals) if teaches else {}
        self.others = {
            parameter: copied(parameter)
            for parameter in parameters
            if parameter in self.first and not parameter.requires_grad
        }
        shared = [parameter for parameter in parameters if not parameter.requires_grad and parameter not in self.first]
        self.model = copy.deepcopy(student, {id(parameter): parameter for parameter in shared})
        pairs = zip(parameters, self.model.parameters(), strict=True)
        self.originals = {ours: originals[parameter] for parameter, ours in pairs if parameter in originals}
        put(self.first)

    @torch.no_grad()
    def gather(self) -> None:
        """Write what the copy has learnt into the student. Every process has to come here."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a pass without gradients leaves the outermost weights gathered
        for whole, split in zip(self.trained, trained_in(self.model), strict=True):
            whole.copy_(split.full_tensor())
        put(self.others)

    @contextlib.contextmanager
    def learnt(self) -> Iterator[None]:
        """Inside, the student has what the copy has learnt so far. Every process has to come here."""
        self.gather()
        try:
            yield
        finally:
            put(self.first)


def trained_in(model: nn.Module) -> list[DTensor]:
    """What trains in a model that is split.

    Raises:
        RuntimeError: some of it is not split, so each process would train it by itself.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]
    if whole:
        raise RuntimeError(f"FSDP2 did not split {whole[0]} (and {len(whole) - 1} others) over the processes.")
    return [parameter for parameter in trained if isinstance(parameter, DTensor)]


def refuse_for_fsdp(model: nn.Module, *, mixed: bool) -> None:
    """Refuse a model that FSDP2 cannot split as `splitting` does.

    Args:
        model: the stock model.
        mixed: True if it trains in mixed precision, where FSDP2 keeps in float32 what trains.

    Raises:
        ValueError: weights are not in float32, or two blocks share a weight.
    """
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    if dtypes != {torch.float32} and not mixed:
        raise ValueError(
            "FSDP2 trains weights of one precision together, and adapters train in float32; load the model in float32 "
            "(--dtype float32), or train with bf16=True (--bf16)."
        )
    blocks = [(f"{name}.", block) for name, block in model.named_modules(remove_duplicate=False) if _is_block(block)]
    block_of: dict[nn.Parameter, nn.Module] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = max((start for start, _ in blocks if name.startswith(start)), key=len, default="")
        block = next((block for start, block in blocks if start == inside), model)
        if block_of.setdefault(parameter, block) is not block:
            raise ValueError(
                f"FSDP2 splits each block of a model by itself, and {name} is a weight of another block as well; start "
                "the conversion with accelerate launch --multi_gpu."
            )


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, each of which is gathered alone while it computes."""
    return [module for module in model.modules() if _is_block(module)]


def _is_block(module: nn.Module) -> bool:
    return isinstance(module, GradientCheckpointingLayer)


class MustBeSplit(TrainerCallback):
    """Stops a training, before its first step, of which the processes would not train the same weights."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Look at all that trains."""
        trained_in(kwargs["model"])
        _show(kwargs["model"])


@contextlib.contextmanager
def splitting(trainer: Trainer, plugin: FullyShardedDataParallelPlugin) -> Iterator[None]:
    """Inside, the trainer splits its model by FSDP2, on CPUs as well: there accelerate alone would train by DDP.

    The parts that are gathered are the blocks, and then all the rest. Every process has all weights, so none has to be
    sent; and the checkpoints are those of split weights.
    """
    state: Any = trainer.accelerator.state
    before, missing = state.distributed_type, getattr(state, "fsdp_plugin", None) is None
    if missing:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, plugin
        if state.mixed_precision != "no":
            plugin.set_mixed_precision(state.mixed_precision)
        trainer.is_fsdp_enabled = True
    used, model = state.fsdp_plugin, cast(nn.Module, trainer.model)
    used.cpu_ram_efficient_loading = False
    used.state_dict_config = used.optim_state_dict_config = None  # those of another type
    used.set_state_dict_type("SHARDED_STATE_DICT")
    used.auto_wrap_policy = transformer_auto_wrap_policy
    used.transformer_cls_names_to_wrap = sorted({type(block).__name__ for block in blocks_of(model)})
    _hide(model)
    trainer.add_callback(MustBeSplit())
    try:
        yield
    finally:
        if missing:
            state.distributed_type = before
            del state.fsdp_plugin


def _hide(model: nn.Module) -> None:
    """Hide the embeddings and the head from accelerate, which would split them by themselves.

    What else shares a weight or a bias with them would then have another one, as in BERT's head.
    """
    for name in EMBEDDINGS:
        setattr(model, name, lambda: None)


def _show(model: nn.Module) -> None:
    for name in EMBEDDINGS:
        delattr(model, name)
