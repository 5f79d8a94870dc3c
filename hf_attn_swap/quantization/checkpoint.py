"""Keeps a model of 8-bit integers in a checkpoint, and gives a loaded model its integers back.

The config names the format int-quantized of compressed-tensors, and `save_pretrained` writes the integers as they are.
transformers reads them with the package compressed-tensors, whose own forward pass turns them into floating point with
equal rounding. `int8_loaded` puts integer modules instead of its Linears before that.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from ..wiring.install import installation_of, model_root
from .linear import Int8Linear

M = TypeVar("M", bound=nn.Module)
FORMAT = "int-quantized"


def int8_loaded(model: M) -> M:
    """Let a model that `from_pretrained` loaded in 8 bits compute with integers again, in place.

    Call it before the first forward pass, in which compressed-tensors turns the weights into floating point.
    `from_pretrained` has done it for a swapped model: compressed-tensors copies what the layers of a pass share, so
    some swaps could not run otherwise.
    The checkpoint may come from `int8_static`, from `int8_dynamic`, or from another program that writes this format.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no int8 weights with 8-bit inputs, has run already, or is offloaded.
    """
    root = model_root(model)
    loaded = {module: stored for module in root.modules() if (stored := stored_integers(module)) is not None}
    if not loaded:
        raise ValueError(
            f"this {type(root).__name__} has no int8 weights with 8-bit inputs. Load a checkpoint that was saved after "
            "int8_static or int8_dynamic, and call int8_loaded before the model runs: its first pass makes the weights "
            "floats."
        )
    if any(module.weight.is_meta for module in loaded.values()):
        raise ValueError("8-bit integers cannot be offloaded; load the model without offloading.")
    quantizer: Any = root.hf_quantizer
    quantizer.compressor.remove_decompression_hook(root)
    symmetric = all(module.input_zero_point is None for module in loaded.values())
    dynamic = any(module.input_scale is None for module in loaded.values())
    for module in loaded.values():
        if (
            module.input_zero_point is None and module.input_scale is not None and not symmetric
        ):  # one scheme describes them all
            module.input_zero_point = torch.zeros_like(module.input_scale, dtype=torch.int8)
    replace(root, loaded)
    quantizer.remove_quantization_config(root)
    describe(root, symmetric=symmetric, dynamic=dynamic)
    return model


def stored_integers(module: nn.Module) -> Int8Linear | None:
    """The integer module for a Linear as compressed-tensors loads it; None for any other module."""
    scheme: Any = getattr(module, "quantization_scheme", None)
    inputs = getattr(scheme, "input_activations", None)
    if not isinstance(module, nn.Linear) or module.weight.dtype != torch.int8 or inputs is None:
        return None
    if inputs.num_bits != 8 or inputs.strategy != ("token" if inputs.dynamic else "tensor"):
        return None
    zero = getattr(module, "weight_zero_point", None)
    if zero is not None and bool(zero.any()):
        return None
    held: Any = module
    if inputs.dynamic:
        return Int8Linear(held.weight.data, held.bias, held.weight_scale.data, None, None) if inputs.symmetric else None
    zero = None if inputs.symmetric else held.input_zero_point.data
    return Int8Linear(held.weight.data, held.bias, held.weight_scale.data, held.input_scale.data, zero)


def replace(root: nn.Module, made: Mapping[nn.Module, nn.Module]) -> None:
    """Put modules instead of others, wherever a module of the model holds these."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if child in made:
                setattr(parent, name, made[child].train(child.training))


def describe(root: Any, *, symmetric: bool, dynamic: bool) -> None:
    """Let the config say how the integers are read.

    Everything that is still a Linear is named as one to leave alone.
    """
    own_config(root)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": symmetric, "dynamic": dynamic}
    inputs["strategy"] = "token" if dynamic else "tensor"
    root.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": [path for path, module in root.named_modules() if isinstance(module, nn.Linear)],
    }


def own_config(root: Any) -> None:
    """Give a model a copy of its config, which other models may share. A patched model has one already."""
    if installation_of(root) is None:
        memo: dict[int, Any] = {}
        for module in root.modules():
            if isinstance(module.__dict__.get("config"), PreTrainedConfig):
                module.__dict__["config"] = copy.deepcopy(module.__dict__["config"], memo)
