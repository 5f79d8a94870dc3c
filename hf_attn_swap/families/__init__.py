"""Finds where an architecture keeps Q, K, V, W_o and the input of its attention.

Each known architecture has one small file. `generic` finds the places in every other architecture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch import nn

from ..core.kind import Kind
from . import generic
from .base import Family
from .source import built_by_implementation

FAMILIES: dict[str, Family] = {}
for _module in iter_modules(__path__):
    _family = getattr(import_module(f"{__name__}.{_module.name}"), "FAMILY", None)
    if isinstance(_family, Family):
        FAMILIES[_family.core] = _family


@dataclass(frozen=True, kw_only=True)
class Site:
    """One attention module of a model.

    Attributes:
        path: the module's path in the model.
        core: the module itself, which calls the attention interface.
        container: the module that applies W_o: the core, or its parent.
        family: where the projections of the module sit.
        cross: True for attention from one sequence to another.
        refused: why the attention of this module cannot be swapped, or None.
        unrunnable: why not even the stock attention of this module runs through our attention function, or None.
        packed: why the module's input is not one row per query, which some variants need, or None.
        biased: what the module does to its scores, beside scaling and masking, as the predicate of a sentence; or None.
        by_mask: True if the forward hands its mask on to the attention function, but no keyword arguments.
    """

    path: str
    core: nn.Module
    container: nn.Module
    family: Family
    cross: bool
    refused: str | None
    unrunnable: str | None
    packed: str | None
    biased: str | None
    by_mask: bool

    @property
    def usable(self) -> bool:
        """True for self-attention that can be swapped. The option `layers` counts these modules."""
        return not self.cross and self.refused is None

    @property
    def kind(self) -> Kind:
        """What the module reads."""
        return generic.kind(self.core)


def sites(model: nn.Module) -> list[Site]:
    """Every module that calls the attention interface, in module order."""
    return list(_walk(model))


def obstacle(model: nn.Module) -> str | None:
    """Why no part of this model can be swapped, or None."""
    for path, module in model.named_modules():
        cls = stock_class(module)
        if built_by_implementation(cls):
            return (
                f"{path} ({cls.__name__}) is built by the name of its attention implementation, so that a saved swap "
                "could not be loaded"
            )
    for site in sites(model):
        if site.unrunnable is not None:
            return (
                f"{site.path} ({type(site.core).__name__}) cannot run through our attention function, swapped or not: "
                f"{site.unrunnable}"
            )
    return None


def _walk(model: nn.Module) -> Iterator[Site]:
    for path, core in model.named_modules():
        known = FAMILIES.get(stock_class(core).__name__)
        cls = stock_class(core)
        if known is None and not generic.is_core(cls):
            continue
        parent = model.get_submodule(path.rpartition(".")[0]) if "." in path else None
        refused = None if known is not None else generic.refusal(core)
        model_type = str(getattr(getattr(core, "config", None), "model_type", "unknown"))
        family = known or generic.family(model_type, core, parent)
        container = parent if family.block == "bert" and parent is not None else core
        yield Site(
            path=path,
            core=core,
            container=container,
            family=family,
            cross=generic.is_cross(path, core, parent),
            refused=refused,
            unrunnable=generic.unrunnable(core, cls),
            packed=generic.packed(cls),
            biased=generic.biased(core, cls),
            by_mask=generic.by_mask(cls),
        )


def stock_class(module: nn.Module) -> Any:
    """The class of a module as transformers defines it, also where a swap or a wrapper has replaced the class."""
    return getattr(type(module), "stock_class", None) or type(module)
