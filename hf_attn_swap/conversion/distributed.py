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


def zero_3(args: TrainingArguments) -> bool:
    """True if DeepSpeed splits the weights over processes."""
    plugin = getattr(args, "deepspeed_plugin", None)
    return plugin is not None and plugin.zero_stage == 3


def is_sharded(model: nn.Module) -> bool:
    """True if the weights are split over processes. Classes tell it too: FSDP gathers some weights between passes.

    DeepSpeed ZeRO-3 marks the parameters that it has split.
    """
    classes = {base.__name__ for kind in {type(module) for module in model.modules()} for base in kind.__mro__}
    split = any(isinstance(parameter, DTensor) or hasattr(parameter, "ds_id") for parameter in model.parameters())
    return split or not classes.isdisjoint({"FSDPModule", "FullyShardedDataParallel"})


def refuse_sharding(args: TrainingArguments, model: nn.Module | None = None) -> None:
    """Refuse a conversion whose weights are split over processes, or would be.

    Raises:
        ValueError: FSDP or DeepSpeed ZeRO-3 is on, or has split the model already.
    """
    fsdp = bool(args.fsdp) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if fsdp or zero_3(args) or (model is not None and is_sharded(model)):
        raise ValueError(
            "convert works on whole weights, and FSDP or DeepSpeed ZeRO-3 splits them over processes; start it with "
            "accelerate launch --multi_gpu, or on one process with low_memory=True (--low-memory)."
        )
