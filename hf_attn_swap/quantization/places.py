"""Chooses the modules of a model that are quantised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList
from transformers.pytorch_utils import Conv1D

from ..layer.swap import Swap

MATMULS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d, Conv1D)


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


def refuse_stacked(root: Any) -> None:
    """Refuse matrices that are stacked in one parameter, as the experts of a mixture are: no protocol rounds them.

    A module that holds Linears has such a parameter for another purpose, such as positions.

    Raises:
        ValueError: names the first of them.
    """
    for path, module in root.base_model.named_modules():
        if "attn_swap" in path.split(".") or isinstance(module, (_ConvNd, ParametrizationList)):
            continue
        if any(map(is_matmul, module.modules())):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and len(parameter) > 1:
                raise ValueError(
                    f"{path}.{name} ({type(module).__name__}) is a stack of {len(parameter)} matrices, such as the "
                    "experts of a mixture. 8 bits are for Linears: the stack would stay as it is, and transformers "
                    "cannot load it beside 8-bit integers. Keep this model in bf16, or quantise a model without it."
                )


def linears(root: Any) -> Iterator[tuple[str, nn.Module]]:
    """Yield path and module of every projection of `quantizable` that is a Linear or GPT-2's Conv1D."""
    for path, module in quantizable(root):
        if is_matmul(module) and not isinstance(module, nn.Conv2d):
            yield path, module


def is_matmul(module: nn.Module) -> bool:
    """Return True for a projection: Linear, Conv2d (patch embedding), and GPT-2's Conv1D.

    A subclass that computes more, as a router that is a Linear and returns a tuple, is none.
    """
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in MATMULS)


def is_norm(module: nn.Module) -> bool:
    """Return True for a normalization layer, such as LayerNorm or RMSNorm: the class name ends with "Norm"."""
    return type(module).__name__.endswith("Norm")
