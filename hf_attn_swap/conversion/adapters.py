"""LoRA adapters around a swapped model, in which the variant's own parameters train as they are."""

from __future__ import annotations

import warnings

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..layer.swap import Swap
from ..variants.base import Variant


def with_adapters(model: PreTrainedModel, rank: int) -> PeftModel:
    """Put LoRA adapters on all matrices but the head, and let the variant's own parameters train as they are."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Swap))
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not name.startswith(inside or ("\0",))
    ]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # PEFT sees by itself how Conv1D lies
        wrapped: PeftModel = get_peft_model(model, config)
    for module in wrapped.modules():
        if isinstance(module, Variant):
            module.requires_grad_(True)
    return wrapped


def adapted_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights that a merge of the adapters changes."""
    return [
        parameter
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
        for parameter in module.get_base_layer().parameters()
    ]


def refuse_adapters(model: nn.Module) -> None:
    """Refuse a model with adapters of the user's own: the conversion takes its own adapters off at the end.

    Raises:
        ValueError: the model has adapters of PEFT.
    """
    if any(isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)) for module in model.modules()):
        raise ValueError(
            "the model has adapters of PEFT, which a conversion would lose; merge them into the weights first: "
            "model = model.merge_and_unload()."
        )
