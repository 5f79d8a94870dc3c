"""What the processes of one conversion, started by accelerate or torchrun, decide alike.

Each process measures by itself, and two devices may round differently. A choice that follows from a figure, such as the
end of a training, has to be the same in all of them: otherwise one process waits for ever for the others.
"""

from __future__ import annotations

import os
from typing import TypeVar

import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from .split_copy import refuse_for_fsdp
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
