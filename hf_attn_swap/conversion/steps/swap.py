"""Step 2: the variant in all layers that may be converted."""

from __future__ import annotations

from collections.abc import Iterator

from ...patch import patch_model
from ..engine import Part
from ..state import State


def swap(state: State) -> Iterator[Part]:
    """Put the variant into all layers that may be converted."""
    yield Part("swap", _swap, again=True)


def _swap(state: State) -> None:
    config = state.config
    patch_model(state.model, config.variant, layers=config.layers, modules=config.modules, **config.options)
