"""Step 1: what the stock model loses in 8 bits, for comparison. Only if 8 bits were asked for."""

from __future__ import annotations

from collections.abc import Iterator

from ..bits import lost_in_bits
from ..engine import Found, Part
from ..state import State


def stock(state: State) -> Iterator[Part]:
    """Measure the stock model in 8 bits. Nothing changes."""
    if state.config.bits is not None:
        yield Part("stock model in 8 bits", _measured)


def _measured(state: State) -> Found:
    return Found(lost=lost_in_bits(state))
