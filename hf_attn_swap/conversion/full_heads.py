"""Lets some key/value heads of a swapped layer keep all keys, in a variant with the option `full_heads`.

Each forward pass reads the option, so nothing is wired anew. DuoAttention (Xiao et al., 2024), section 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

from ..variants.base import Variant
from ..wiring.layers import Layer

OPTION = "full_heads"


def by_heads(classes: Iterable[type[Variant]]) -> str:
    """The name of the variant among these that can leave heads as they are.

    Raises:
        ValueError: none can.
    """
    classes = tuple(classes)
    for cls in classes:
        if OPTION in {field.name for field in dataclasses.fields(cls.Options)}:
            return cls.name
    names = "+".join(cls.name for cls in classes)
    raise ValueError(f"{names} changes all heads of a layer; heads are chosen for a variant with {OPTION}: window.")


def check_full_heads(layer: Layer) -> str:
    """The name of the variant of a swapped layer that can leave heads as they are.

    Raises:
        ValueError: no variant can, or the layer has a fit.
    """
    if layer.swap.fitted:
        raise ValueError(
            f"layer {layer.number} has a fit ({', '.join(layer.swap.fitted)}), which is that of other heads; choose "
            "the heads before the fit."
        )
    return by_heads(type(variant) for variant in layer.swap.variants)


def set_full_heads(layer: Layer, heads: Iterable[int]) -> None:
    """Let exactly these key/value heads of a swapped layer keep all keys. `Installation.refresh` has to follow.

    Args:
        layer: the layer.
        heads: the numbers of the heads, from 0.

    Raises:
        ValueError: as in `check_full_heads`.
    """
    name, heads = check_full_heads(layer), sorted(heads)
    for swap in layer.copies:
        swap.set_options({**swap.options, name: {**swap.options[name], OPTION: heads}})


@contextlib.contextmanager
def one_head(layer: Layer, head: int) -> Iterator[None]:
    """Inside the `with` block, all other key/value heads of a swapped layer keep all keys.

    Raises:
        ValueError: as in `check_full_heads`.
    """
    before = [(swap, swap.options) for swap in layer.copies]
    set_full_heads(layer, set(range(layer.swap.geometry.kv_heads)) - {head})
    try:
        yield
    finally:
        for swap, options in before:
            swap.set_options(options)
