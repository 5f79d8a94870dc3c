"""Step 8: the adapters merged into the weights, and no swap in layers that keep their own attention."""

from __future__ import annotations

from collections.abc import Iterator

from ...patch import unpatch_model
from ..engine import Part
from ..state import State


def finish(state: State) -> Iterator[Part]:
    """Leave the model as it will be used."""
    if state.adapters is not None and state.layers and state.changed:
        yield Part("adapters merged", _merge, again=True)
    yield Part("clear", _clear, measured=False, again=True)


def _merge(state: State) -> None:
    """Merge the adapters. From here on, there is no way back."""
    state.final = True
    state.leave_adapters(merged=True)


def _clear(state: State) -> None:
    """Take off adapters that have learnt nothing, and the swaps that are not used.

    If the variant carries scores and runs in some layers, the other swaps stay at strength 0: they pass scores on.
    """
    state.leave_adapters(merged=False)
    carries = any(swap.carries for group in state.swaps.values() for swap in group)
    if state.kept and not (carries and state.layers):
        unpatch_model(state.model, layers=sorted(state.kept))
