"""Step 9: channels of like sizes, which lose less in 8 bits. Only if 8 bits were asked for. It is the same function."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ...layer.smoothing import Smoothing
from ...patch import need_installation
from ..bits import batches, lost_in_bits
from ..engine import Found, Part
from ..parts import vectors_of
from ..smooth import smooth as smooth_channels
from ..state import State


def smooth(state: State) -> Iterator[Part]:
    """Measure the model in 8 bits as it is, and with smoothed channels; keep what loses less."""
    if state.config.bits is None or not state.swaps:
        return
    yield Part("in 8 bits", _in_bits)
    yield Part("in 8 bits, smoothed", partial(_smoothed, state.record[-1].lost.degradation), again=True)


def _in_bits(state: State) -> Found:
    return Found(lost=lost_in_bits(state))


def _smoothed(before: float, state: State) -> Found | None:
    """Smooth the channels. If that loses more, the weights get their former scales."""
    state.keep(vectors_of(state.student))  # `qat` trains them, and their first values are those without the scales
    try:
        found = smooth_channels(state.model, batches(state), progress=state.progress)
    except ValueError as problem:
        state.say(f"No channel was smoothed: {problem}")
        return Found("in 8 bits, nothing smoothed", lost_in_bits(state))
    lost = lost_in_bits(state)
    if lost.degradation < before:
        state.say(str(found))
        return Found(lost=lost)
    installation = need_installation(state.model)
    installation.drop(Smoothing.name)
    state.say("Smoothed channels lost more in 8 bits, so the channels are as they were.")
    return Found("smoothing taken back", lost_in_bits(state))
