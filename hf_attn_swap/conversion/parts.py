"""The parts of an attention block by name, so that they can be trained or frozen in any family."""

from __future__ import annotations

from torch import nn

from ..families import Site
from ..patch import need_installation, swappable

PARTS = ("query", "key", "value", "output", "swap")


def part_of(model: nn.Module, part: str) -> list[nn.Module]:
    """One part of every swapped layer: a projection ("query", "key", "value", "output"), or "swap".

    Raises:
        ValueError: an unknown part, a model that is not patched, or a projection under no name that we know.
    """
    installation = need_installation(model)
    usable = swappable(installation.root)
    return [site_part(usable[index], part) for index in installation.swaps()]


def site_part(site: Site, part: str) -> nn.Module:
    """The same of one layer; fused projections are one module, whatever the part."""
    if part not in PARTS:
        raise ValueError(f"{part!r} is no part of an attention block; known: {', '.join(PARTS)}.")
    if part == "swap":
        swap = site.core.attn_swap
        assert isinstance(swap, nn.Module)
        return swap
    holder = site.container if part == "output" else site.core
    path = getattr(site.family, part)
    if path is None:
        raise ValueError(f"{site.path}: the {part} projection is under no name that we know; choose other parts.")
    return holder.get_submodule(path)
