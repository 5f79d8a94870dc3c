"""What a conversion in progress loses in 8 bits, as machines run it, with ranges from its training rows."""

from __future__ import annotations

from ..measuring.batches import Batch, evaluating
from ..measuring.lost import Lost
from ..quantization.machine import machine_w8a8
from .rows import TOKENS
from .state import State

RANGE_TOKENS = 8192  # tokens that the ranges are fitted on,
RANGE_ROWS = 64  # or rows of other data
AT_ONCE = 4  # rows of a batch


def batches(state: State) -> list[Batch]:
    """Some training rows, spread evenly over all of them, in batches."""
    count = round(RANGE_TOKENS / state.rows.length) if state.rows.unit == TOKENS else RANGE_ROWS
    count = min(len(state.rows), max(2 * AT_ONCE, count))
    chosen = [place * len(state.rows) // count for place in range(count)]
    return list(state.rows.some(chosen).batches(1 if state.config.low_memory else AT_ONCE))


def lost_in_bits(state: State) -> Lost:
    """What the model loses on the held-out rows, as it is, in 8 bits."""
    with evaluating(state.model), machine_w8a8(state.model, batches(state)):
        return state.lost()
