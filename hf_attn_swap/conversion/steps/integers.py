"""Step 11: weights in 8-bit integers, and a static range for each input. Only if 8 bits were asked for."""

from __future__ import annotations

from collections.abc import Iterator

from ...measuring.batches import evaluating
from ...quantization.static import input_ranges, int8_static
from ..bits import batches
from ..engine import Part
from ..state import State
from .qat import RANGES


def integers(state: State) -> Iterator[Part]:
    """Put integers instead of the weights. From here on, there is no way back."""
    if state.config.bits is not None and state.swaps:
        yield Part("8-bit integers", _round, again=True)


def _round(state: State) -> None:
    ranges = {path: (low, high) for path, (low, high) in state.notes.get(RANGES, {}).items()}
    if not ranges:
        with evaluating(state.model):
            ranges = input_ranges(state.model, batches(state))
    state.final = True
    int8_static(state.model, ranges)
