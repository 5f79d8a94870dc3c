"""Refuses, when a model is patched, layers that could not carry scores from one to the next.

Scores are carried within one list of layers of one stack. They need an object that the stack gives to its layers by
keyword arguments, layers with the same number of heads and of further keys, and tokens that keep their places. Each of
these is read from the source of the modules between the stack and its layers, so that nothing is found out in the
middle of a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..families import Site, stock_class
from ..families.source import hands_keywords_on, mentions, moves_windows, slices_unmasked
from .layers import Layer
from .placed import encoder_of, group_of, layer_of, stacks_of, takes_keywords

_STRIDED = (nn.MaxPool1d, nn.AvgPool1d, nn.Conv1d)


def check(root: Any, layers: Iterable[Layer]) -> None:
    """Check the layers as they would be: `copies` are the swaps that they would have.

    Raises:
        ValueError: scores cannot be carried between these layers.
    """
    chosen = [layer for layer in layers if layer.swapped and layer.swap.carries]
    groups: dict[str, list[Layer]] = {}
    for layer in chosen:
        groups.setdefault(group_of(layer.path), []).append(layer)
    stacks = dict(zip(chosen, stacks_of(root, [layer.site for layer in chosen]), strict=True))
    paths = {id(module): path for path, module in root.named_modules()}
    for members in groups.values():
        if len(members) == 1 and not members[0].site.family.shared:
            continue  # a single layer takes scores from no other
        heads = sorted({layer.swap.geometry.heads for layer in members})
        further = sorted({layer.swap.further_keys for layer in members})
        blocks = [layer_of(root, layer.path) for layer in members]
        mixed = len({layer.site.borrows for layer in members}) > 1
        drops = mixed and any(slices_unmasked(stock_class(stacks[layer])) for layer in members)
        moves = any(moves_windows(stock_class(block)) for block in blocks) and not _alike(blocks)
        for layer in members:
            site, names = layer.site, "+".join(layer.swap.names)
            if len(heads) > 1:
                raise ValueError(
                    f"{site.path}: {names} carries scores between layers with the same number of heads, and these have "
                    f"{heads}; choose layers that agree (layers= or modules=)."
                )
            if len(further) > 1:
                raise ValueError(
                    f"{site.path}: {names} carries scores between layers with the same number of further keys, and "
                    f"these have {further}; give each of them the same pairs (tokens=), or choose layers that agree "
                    "(layers= or modules=)."
                )
            reason = _obstacle(root, site, stacks[layer], paths, [member.site for member in members])
            if moves:
                reason = (
                    f"{stock_class(blocks[0]).__name__} cuts its tokens into windows, and not every layer cuts them "
                    "alike, so that places of one layer are not places of the next"
                )
            if _shortens(root, group_of(layer.path), members):
                parent = root.get_submodule(group_of(layer.path).rpartition(".")[0])
                reason = (
                    f"{stock_class(parent).__name__} shortens the sequence between its layers, so that places of one "
                    "layer are not places of the next"
                )
            if drops:
                reason = (
                    f"{stock_class(stacks[layer]).__name__} may drop tokens (logits_to_keep) before the layers that "
                    "take their keys from others, so choose layers of one of the two kinds (layers=)"
                )
            if reason is not None:
                raise ValueError(
                    f"{site.path}: {names} carries scores across layers, but {reason}; use another variant, or "
                    "modern_hopfield with alpha_prime=0."
                )


def _shortens(root: Any, group: str, members: list[Layer]) -> bool:
    """True if a list of pooling modules or of convolutions with a stride lies beside this list of layers.

    Such a list has a module for each layer, or for each but one (Informer's distilling; None stands for no module).
    """
    inside, _, name = group.rpartition(".")
    for other, beside in root.get_submodule(inside).named_children():
        if other == name or not isinstance(beside, nn.ModuleList) or len(beside) < len(members) - 1:
            continue
        for module in beside.modules():
            if isinstance(module, _STRIDED) and module.stride not in (1, (1,)):
                return True
    return False


def _alike(blocks: list[nn.Module]) -> bool:
    """True if the numbers of these blocks are the same, but for numbers that count the blocks."""
    for name in vars(blocks[0]):
        values = [vars(block).get(name) for block in blocks]
        if name.startswith("_") or not all(map(_plain, values)) or all(value == values[0] for value in values):
            continue
        if not all(type(value) is int for value in values) or len({value - i for i, value in enumerate(values)}) > 1:  # type: ignore[operator]  # whole numbers
            return False
    return True


def _plain(value: Any) -> bool:
    """True for a number, for None, and for a tuple of these; a module may also keep configs in tuples."""
    if isinstance(value, tuple):
        return all(map(_plain, value))
    return isinstance(value, (bool, int, float, type(None)))


def _obstacle(root: Any, site: Site, stack: nn.Module, paths: dict[int, str], members: list[Site]) -> str | None:
    """Why a layer cannot take scores from the layer below, or None."""
    block = layer_of(root, site.path)
    cls = stock_class(block)
    if not takes_keywords(block):
        return f"{cls.__name__} takes no keyword arguments, by which they arrive"
    encoder = encoder_of(stack, [member.container for member in members])
    start = encoder if encoder is not None and takes_keywords(encoder) else stack
    inside = paths[id(start)]
    layers = group_of(site.path)
    for end in range(len(inside.split(".")) if inside else 0):
        outer = ".".join(inside.split(".")[:end])
        above = root.get_submodule(outer) if outer else root
        if mentions(stock_class(above), layers[len(outer) + 1 if outer else 0 :]):
            name = stock_class(above).__name__
            return f"{name} calls these layers itself, without the stack that would carry the scores"
    for parent, child, index in _hops(start, paths[id(start)], site.path):
        if hands_keywords_on(stock_class(parent), child, index) is False:
            return (
                f"{stock_class(parent).__name__} does not give its keyword arguments to {child}, so that nothing could "
                "carry them there"
            )
    return None


def _hops(start: nn.Module, path: str, core: str) -> Iterator[tuple[nn.Module, str, int | None]]:
    """Each module between `start` and the core, with the name of its child on the way.

    For a child in a list, also the number in the list.
    """
    parts = core[len(path) + 1 if path else 0 :].split(".")
    here = start
    while parts:
        child = parts.pop(0)
        module, index = here.get_submodule(child), None
        if isinstance(module, nn.ModuleList) and parts:
            index = int(parts.pop(0))
            module = module[index]
        yield here, child, index
        here = module
