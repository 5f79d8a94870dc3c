"""What the processes of one conversion, started by accelerate or torchrun, decide alike.

Each process measures by itself, and two devices may round differently. A choice that follows from a figure, such as the
end of a training, has to be the same in all of them: otherwise one process waits for ever for the others.
"""

from __future__ import annotations

import os
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from transformers import TrainingArguments

from .teacher import is_sharded

T = TypeVar("T")


def of_the_first(value: T, args: TrainingArguments) -> T:
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


def refuse_split_weights(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Refuse what splits the weights over processes: the steps of a conversion read and write whole weights.

    Raises:
        ValueError: FSDP or DeepSpeed ZeRO-3 is on, or the model is split already.
    """
    by = None
    if args.fsdp or _launched_with_fsdp():
        by = "FSDP"
    elif zero_3(args):
        by = "DeepSpeed ZeRO-3"
    elif model is not None and is_sharded(model):
        by = "FSDP or DeepSpeed ZeRO-3"
    if by is not None:
        raise ValueError(
            f"convert works on whole weights, and {by} splits them over processes; start it with accelerate launch "
            "--multi_gpu, which gives each process the whole model, or on one process with low_memory=True "
            "(--low-memory)."
        )


def _launched_with_fsdp() -> bool:
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
