"""Works out the place of each swap in its model, without changing the model.

`places_of` is a pure function. `install.Installation` applies the result.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from ..families import Site, stock_class
from ..families.source import arguments
from ..layer.swap import Argument, Swap, Wiring
from .hooks import InOrder
from .layers import copies_at


@dataclass(frozen=True, kw_only=True)
class Placed:
    """One attention module of a model.

    Attributes:
        site: the module, and the places of its projections.
        stack: the nearest transformers model around the module. The layers of a stack share one forward pass.
        layer: the block around the module if a variant needs a hook on the block, otherwise None.
        swaps: the swaps of the module. A stock module has none; a module has several if PEFT keeps copies.
        wiring: the place of these swaps in the model; None for a stock module.
    """

    site: Site
    stack: PreTrainedModel
    layer: nn.Module | None
    swaps: tuple[Swap, ...]
    wiring: Wiring | None


def places_of(root: PreTrainedModel, sites: Sequence[Site]) -> list[Placed]:
    """The place of each of these attention modules, in their order."""
    stacks = stacks_of(root, sites)
    swaps = [copies_at(site) for site in sites]
    orders, firsts, lasts = _orders(sites, stacks, swaps)
    lent = {id(stack) for stack, site in zip(stacks, sites, strict=True) if site.borrows}
    placed = []
    for index, (site, stack, swaps_here) in enumerate(zip(sites, stacks, swaps, strict=True)):
        wiring, layer = None, None
        if swaps_here:
            places = {"first": index in firsts, "last": index in lasts, "lent": id(stack) in lent}
            wiring = _wiring(site, swaps_here[0], orders.get(index, 0), **places)
            if any(swap.carries or swap.wants_residual for swap in swaps_here):
                layer = layer_of(root, site.path)
        placed.append(Placed(site=site, stack=stack, layer=layer, swaps=swaps_here, wiring=wiring))
    return placed


def layer_of(root: nn.Module, path: str) -> nn.Module:
    """The block around a core: its nearest ancestor in a list of modules, or the core itself."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if parts[end - 1].isdigit():
            return root.get_submodule(".".join(parts[:end]))
    return root.get_submodule(path)


def _orders(
    sites: Sequence[Site], stacks: list[PreTrainedModel], swaps: list[tuple[Swap, ...]]
) -> tuple[dict[int, int | None], set[int], set[int]]:
    """The order of the layers that carry scores.

    Scores are carried within one list of layers: another list of the same stack starts anew.

    Returns:
        By the index of the site, the layer's number among the layers of its stack that carry scores (None for a module
        that serves several layers); and the indices of the first and of the last such layer of each list.
    """
    orders: dict[int, int | None] = {}
    counts: dict[int, int] = {}
    members: dict[tuple[int, str], list[int]] = {}
    for index, (site, stack, swaps_here) in enumerate(zip(sites, stacks, swaps, strict=True)):
        if any(swap.carries for swap in swaps_here):
            number = counts.get(id(stack), 0)
            orders[index] = None if site.family.shared else number
            counts[id(stack)] = number + 1
            members.setdefault((id(stack), group_of(site.path)), []).append(index)
    alone = [group for group in members.values() if orders[group[-1]] is not None]
    return orders, {group[0] for group in alone}, {group[-1] for group in alone}


def group_of(path: str) -> str:
    """The list of layers that a module lies in: what stands before the first number in its path."""
    parts = path.split(".")
    return ".".join(parts[: next((place for place, part in enumerate(parts) if part.isdigit()), 0)])


def _wiring(site: Site, swap: Swap, order: int | None, *, first: bool, last: bool, lent: bool) -> Wiring:
    """The facts that a swap needs about its place."""
    names = arguments(stock_class(site.container))
    kinds = getattr(site.core.config, "layer_types", None) or ()

    def argument(name: str) -> Argument:
        return Argument(name, names.index(name) if name in names else None)

    return Wiring(
        path=site.path,
        order=order,
        first=first,
        last=last,
        uniform=len(set(kinds)) <= 1,
        states=argument(site.states),
        others=tuple(argument(name) for name in site.others),
        mask=None if site.mask is None else argument(site.mask),
        cache_index=site.cache_index,
        caches=site.caches,
        borrows=site.borrows,
        lent=lent,
        dropout_path=site.family.dropout if site.family.block == "core" else None,
    )


def stacks_of(root: PreTrainedModel, sites: Sequence[Site]) -> list[PreTrainedModel]:
    """For each site, the nearest transformers model around it."""
    models = {name: module for name, module in root.named_modules() if isinstance(module, PreTrainedModel)}
    return [_nearest(models, site.path, root) for site in sites]


def _nearest(models: dict[str, PreTrainedModel], path: str, root: PreTrainedModel) -> PreTrainedModel:
    """The model with the longest name that is a proper beginning of `path`; the root if there is none."""
    parts = path.split(".")
    for end in range(len(parts) - 1, -1, -1):
        model = models.get(".".join(parts[:end]))
        if model is not None:
            return model
    return root


def encoder_of(stack: nn.Module, containers: list[nn.Module]) -> nn.Module | None:
    """The child of a stack that calls all of these modules; None if there is none."""
    for child in stack.children():
        inside = {id(module) for module in child.modules()}
        if not isinstance(child, nn.ModuleList) and all(id(container) in inside for container in containers):
            return child
    return None


def orders_of(root: nn.Module, module: nn.Module, placed: Sequence[Placed]) -> Iterator[InOrder]:
    """A hook for each list of layers in `module` with layers that carry scores, which compares the list later.

    A module that serves several layers counts its calls, and needs none.
    """
    start = next(len(path) + 1 if path else 0 for path, submodule in root.named_modules() if submodule is module)
    cores: dict[str, dict[int, list[tuple[str, str]]]] = {}
    for place in placed:
        if place.wiring is None or place.wiring.order is None or not any(swap.carries for swap in place.swaps):
            continue
        layers = group_of(place.site.path)
        if layers:
            number, _, inside = place.site.path[len(layers) + 1 :].partition(".")
            cores.setdefault(layers, {}).setdefault(int(number), []).append((inside, place.site.path))
    for layers, known in cores.items():
        yield InOrder(layers[start:], len(list(root.get_submodule(layers).children())), known)


def takes_keywords(module: nn.Module) -> bool:
    """True if the forward of a module takes any keyword argument."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
