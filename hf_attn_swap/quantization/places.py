"""Chooses the modules of a model that are quantised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from ..layer.swap import Swap


def quantizable(root: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of every projection, norm and embedding of the model, without its task head.

    Of the parameters of a swap, only the projections that the variant declares are included.
    """
    base = root.base_model
    variants = [variant for module in base.modules() if isinstance(module, Swap) for variant in module.variants]
    own = {id(getattr(variant, name)) for variant in variants for name in variant.projections}
    inside = {id(module) for module in base.modules()}
    for path, module in root.named_modules():
        if id(module) not in inside:
            continue
        if ".attn_swap." in path and id(module) not in own:
            continue
        if is_matmul(module) or is_norm(module) or isinstance(module, nn.Embedding):
            yield path, module


def linears(root: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of every projection of `quantizable` that is a Linear or GPT-2's Conv1D."""
    for path, module in quantizable(root):
        if is_matmul(module) and not isinstance(module, nn.Conv2d):
            yield path, module


def is_matmul(module: nn.Module) -> bool:
    """Return True for a projection: Linear, Conv2d (patch embedding), and GPT-2's Conv1D."""
    return isinstance(module, nn.Linear | nn.Conv2d | Conv1D)


def is_norm(module: nn.Module) -> bool:
    """Return True for a normalization layer, such as LayerNorm or RMSNorm: the class name ends with "Norm"."""
    return type(module).__name__.endswith("Norm")
