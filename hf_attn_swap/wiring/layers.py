"""One layer of a model as one object: its number, its attention module, and the swaps in this module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..families import Site
from ..layer.swap import Swap


@dataclass(frozen=True, kw_only=True)
class Layer:
    """A layer that can be swapped.

    Two objects are equal if they have the same number and the same attention module, whatever is swapped.

    Attributes:
        number: the number that the option `layers` counts, from 0.
        site: the attention module, and the places of its projections.
        copies: the swaps of the module; none for a stock module. There are several if PEFT keeps copies: the swap that
            `patch_model` made comes first, and PEFT runs one of the others.
    """

    number: int
    site: Site
    copies: tuple[Swap, ...] = field(compare=False)

    @property
    def path(self) -> str:
        """The path of the attention module in its model."""
        return self.site.path

    @property
    def swapped(self) -> bool:
        """True if the module has a swap."""
        return bool(self.copies)

    @property
    def swap(self) -> Swap:
        """The swap of a swapped layer. PEFT's copies differ from this swap in the values of parameters alone."""
        assert self.copies, f"layer {self.number} is not swapped"
        return self.copies[0]


def layers_at(sites: Iterable[Site]) -> tuple[Layer, ...]:
    """The layers among the attention modules of a model, in module order: those that can be swapped, swapped or not."""
    usable = (site for site in sites if site.usable)
    return tuple(Layer(number=number, site=site, copies=copies_at(site)) for number, site in enumerate(usable))


def copies_at(site: Site) -> tuple[Swap, ...]:
    """The swaps of an attention module."""
    return tuple(swaps_in(getattr(site.core, "attn_swap", None)))


def swaps_in(child: Any) -> Iterator[Swap]:
    """The swaps in a child `attn_swap`: the child itself, or the swaps inside a wrapper of PEFT."""
    if isinstance(child, nn.Module):
        yield from (module for module in child.modules() if isinstance(module, Swap))
