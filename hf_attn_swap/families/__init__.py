"""Finds where an architecture keeps Q, K, V, W_o and the input of its attention.

Each known architecture has one small file. `generic` finds the places in every other architecture.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from torch import nn

from ..core.call import Geometry
from ..core.kind import Kind
from . import generic
from .base import Family
from .source import (
    arguments,
    borrows_unless,
    built_by_implementation,
    cache_index,
    is_core,
    other_states,
    reads_mask,
    stock_class,
    updates_cache,
)

__all__ = ["FAMILIES", "Family", "Kind", "Site", "obstacle", "sites", "stock_class"]

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
        resized: why the module's output is no tensor like its input, which some variants need, or None.
        biased: what the module does to its scores, beside scaling and masking, as the predicate of a sentence; or None.
        query_scale: the factor by which the module itself multiplies its queries in place of the attention function;
            None if the source does not show a number.
        by_mask: True if the forward hands its mask on to the attention function, but no keyword arguments.
        states: the name of the container's first argument, which is the input of the attention.
        others: the arguments of the core that are the states of another sequence, if they are given.
        mask: the argument of the core that is its mask and nothing else; None if the source does not show one.
        cache_index: the attribute of the core that is the number of its layer in a cache; None if the source shows
            no attribute.
        caches: True if the core gives keys and values to a cache.
        borrows: True if the keys and values of this core are those of another layer, which alone are in a cache.
        reads_mask: True if the core looks into its mask, and does not only hand it on.
    """

    path: str
    core: nn.Module
    container: nn.Module
    family: Family
    cross: bool
    refused: str | None
    unrunnable: str | None
    packed: str | None
    resized: str | None
    biased: str | None
    query_scale: float | None
    by_mask: bool
    states: str
    others: tuple[str, ...]
    mask: str | None
    cache_index: str | None
    caches: bool
    borrows: bool
    reads_mask: bool

    @property
    def usable(self) -> bool:
        """True for self-attention that can be swapped. The option `layers` counts these modules."""
        return not self.cross and self.refused is None

    def input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The input x of the attention, among the arguments of a call of the container."""
        return args[0] if args else kwargs[self.states]

    def geometry(self) -> Geometry:
        """The sizes of the module, and the scale of its queries (1 if it is not known)."""
        return replace(self.family.geometry(self.core), query_scale=self.query_scale or 1.0)

    @property
    def kind(self) -> Kind:
        """What the module reads."""
        return generic.kind(self.core)


def sites(model: nn.Module) -> list[Site]:
    """Every module that calls the attention interface, in module order."""
    return list(_walk(model))


def obstacle(model: nn.Module, attention_sites: Iterable[Site]) -> str | None:
    """Why no part of this model can be swapped, or None, from its attention modules as `sites` finds them."""
    for path, module in model.named_modules():
        cls = stock_class(module)
        if built_by_implementation(cls):
            return (
                f"{path} ({cls.__name__}) is built by the name of its attention implementation, so that a saved swap "
                "could not be loaded"
            )
    for site in attention_sites:
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
        # A program may replace the forward of a patched class. Its modules are still found, to be unpatched.
        replaced = not is_core(cls) and hasattr(core, "attn_swap")
        if known is None and not is_core(cls) and not replaced:
            continue
        parent = model.get_submodule(path.rpartition(".")[0]) if "." in path else None
        model_type = str(getattr(getattr(core, "config", None), "model_type", "unknown"))
        family = known or generic.family(model_type, core, parent)
        container = parent if family.block == "bert" and parent is not None else core
        cross = generic.is_cross(path, core, parent)
        yield Site(
            path=path,
            core=core,
            container=container,
            family=family,
            cross=cross,
            refused=None if cross or replaced else _refusal(core, container, known),
            unrunnable=generic.unrunnable(core, cls),
            packed=generic.packed(core, cls),
            resized=generic.resized(core),
            biased=generic.biased(core, cls),
            query_scale=generic.query_scale(core, cls, family),
            by_mask=generic.by_mask(cls),
            states=next(iter(arguments(stock_class(container))), ""),
            others=other_states(cls, family.key),
            mask=generic.mask_argument(cls),
            cache_index=cache_index(cls),
            caches=updates_cache(cls),
            borrows=_borrows(core, cls),
            reads_mask=known is None and reads_mask(cls),
        )


def _borrows(core: nn.Module, cls: Any) -> bool:
    """True if a core takes the keys and values of another layer, by an attribute of its own."""
    decides = borrows_unless(cls)
    return decides is not None and bool(getattr(core, decides[0], decides[1])) is not decides[1]


def _refusal(core: nn.Module, container: nn.Module, known: Family | None) -> str | None:
    """Why a core cannot be swapped, or None."""
    if (unknown := generic.unknown(stock_class(core))) is not None:
        return unknown
    return generic.refusal(core) if known is None else known.missing(core, container)
