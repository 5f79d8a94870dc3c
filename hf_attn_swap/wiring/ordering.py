"""Refuses, when a model is patched, a window over tokens that do not stand in one order.

A window counts places: the tokens of one call of the attention function must be one text, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..families import stock_class
from ..families.source import moves_windows
from .layers import Layer
from .placed import layer_of


def check(root: Any, layers: Iterable[Layer]) -> None:
    """Check the layers as they would be: `copies` are the swaps that they would have.

    Raises:
        ValueError: a layer would have a window, and its tokens do not stand in one order.
    """
    for layer in layers:
        if not layer.swapped or layer.swap.span is None:
            continue
        site, block = layer.site, stock_class(layer_of(root, layer.path))
        reason = None if site.packed is None else f"{type(site.core).__name__} has none: {site.packed}"
        if moves_windows(block):
            reason = f"{block.__name__} cuts its tokens into windows of its own"
        if reason is not None:
            raise ValueError(
                f"{site.path}: {'+'.join(layer.swap.names)} counts the places of tokens in one text, but {reason}; "
                "leave these layers out (modules= or layers=), or use a variant that hides no keys."
            )
