"""What the processes of one conversion, started by accelerate or torchrun, decide alike.

Each process measures by itself, and two devices may round differently. A choice that follows from a figure, such as the
end of a training, has to be the same in all of them: otherwise one process waits for ever for the others. Every process
holds the whole model, because the steps of a conversion read and write whole weights.
"""

from __future__ import annotations

import os
from typing import TypeVar

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import TrainingArguments

T = TypeVar("T")


def broadcast_from_rank0(value: T, args: TrainingArguments) -> T:
    """The value that the first process has. Every process has to come here."""
    if args.world_size == 1:
        return value
    held = [value]
    dist.broadcast_object_list(held)
    return held[0]


def refuse_sharding(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Refuse weights that are split over processes, or would be.

    Classes tell it, too: FSDP gathers some weights between passes.

    Raises:
        ValueError: FSDP or DeepSpeed ZeRO-3 is on, or has split the model already.
    """
    split = bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    split |= getattr(getattr(args, "deepspeed_plugin", None), "zero_stage", 0) == 3
    if model is not None:
        classes = {base.__name__ for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
        split |= not classes.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})
        split |= any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters())
    if split:
        raise ValueError(
            "conversions and distillation work on whole weights, and FSDP or DeepSpeed ZeRO-3 splits them over "
            "processes; start them with accelerate launch --multi_gpu, or on one process (--low-memory)."
        )
