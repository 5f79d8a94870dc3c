"""Lets some key/value heads of a swapped layer keep all keys, in a variant with the option `full_heads`.

DuoAttention (Xiao et al., 2024), section 2.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable

from ..layer.swap import Swap
from ..patch import build_swap
from ..variants.base import Variant
from ..wiring.layers import Layer

OPTION = "full_heads"


def by_heads(classes: Iterable[type[Variant]]) -> str:
    """The name of the variant among these that can leave heads as they are.

    Raises:
        ValueError: none can.
    """
    for cls in classes:
        if OPTION in {field.name for field in dataclasses.fields(cls.Options)}:
            return cls.name
    names = "+".join(cls.name for cls in classes)
    raise ValueError(f"{names} changes all heads of a layer; heads are chosen for a variant with {OPTION}: window.")


def with_full_heads(layer: Layer, full: Iterable[int], *, strength: float = 1.0) -> Swap:
    """A new swap for a swapped layer, with the same variants, options and parameters, and all keys in these heads.

    Args:
        layer: the layer; it is not changed.
        full: the numbers of its key/value heads that keep all keys.
        strength: the strength, a number from 0 to 1.

    Raises:
        ValueError: no variant of the layer can leave heads as they are, or the layer has a fit.
    """
    before = layer.swap
    if before.fitted:
        raise ValueError(
            f"layer {layer.number} has a fit ({', '.join(before.fitted)}), which is that of other heads; choose the "
            "heads before the fit."
        )
    classes = tuple(type(variant) for variant in before.variants)
    options = copy.deepcopy(before.options)
    options[by_heads(classes)][OPTION] = list(full)
    swap = build_swap(layer, classes, options, strength=strength, selection=before.selection)
    swap.load_state_dict(before.state_dict())
    return swap
