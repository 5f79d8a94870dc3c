"""The passages on which a conversion measures recall: beyond the keys that a query of the converted model sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..layer.registry import build_options, parse, parse_options
from ..measuring.recall import LENGTH, Passages

DISTANCE = 200  # tokens between the two readings of a passage, unless a window is wider


def reach_of(variant: str, options: Mapping[str, Any]) -> int | None:
    """How many of the last keys a query sees with a variant or a composition; None if no key is hidden.

    Args:
        variant: the name.
        options: as `patch_model` takes them.
    """
    classes = parse(variant)
    by_variant = parse_options(classes, options)
    return least(cls.reach(build_options(cls, by_variant[cls.name])) for cls in classes)


def least(reaches: Iterable[int | None]) -> int | None:
    """The smallest of some numbers, or None."""
    return min((reach for reach in reaches if reach is not None), default=None)


def passages_beyond(model: nn.Module, rows: Iterable[Any], reach: int | None, distance: int | None = None) -> Passages:
    """Passages that are read again where a query no longer sees them.

    Args:
        model: a causal language model.
        rows: token ids, as `recall` takes them.
        reach: how many of the last keys a query sees; None for all.
        distance: the tokens between the two readings; None is `DISTANCE`, or the reach of a wider window.

    Raises:
        ValueError: as `recall`: the model is no causal language model, or the rows or the model are too short. Or a
            query still sees the whole passage after this distance.
    """
    if distance is not None and reach is not None and distance + LENGTH <= reach:
        raise ValueError(
            f"a query sees the last {reach:,} keys, and so the whole passage of {LENGTH} tokens after {distance:,} "
            f"tokens; take at least {reach - LENGTH + 1:,}."
        )
    return Passages.of(model, rows, (distance or max(DISTANCE, reach or 0),))
