"""Finds the projections and the swap of an attention block by name, to train or freeze them in any family."""

from __future__ import annotations

from torch import nn

from ..families import Site
from ..patch import need_installation

PARTS = ("query", "key", "value", "output", "swap")


def part_of(model: nn.Module, part: str) -> list[nn.Module]:
    """Return one part of every swapped layer: a projection ("query", "key", "value" or "output"), or the "swap".

    Raises:
        ValueError: the part is unknown, the model is not patched, or the package does not know the projection's name.
    """
    return [site_part(layer.site, part) for layer in need_installation(model).layers()]


def site_part(site: Site, part: str) -> nn.Module:
    """Return one part of one layer. If one module holds several projections, each of them gives that module.

    Raises:
        ValueError: the part is unknown, or the package does not know the projection's name.
    """
    if part not in PARTS:
        raise ValueError(f"{part!r} is not a part of an attention block; choose one of {', '.join(PARTS)}.")
    if part == "swap":
        swap = site.core.attn_swap
        assert isinstance(swap, nn.Module)
        return swap
    holder = site.container if part == "output" else site.core
    path = getattr(site.family, part)
    if path is None:
        raise ValueError(
            f"{site.path}: the package does not know which module is the {part} projection; choose other parts."
        )
    return holder.get_submodule(path)
