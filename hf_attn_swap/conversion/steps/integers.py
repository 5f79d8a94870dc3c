"""Step 11: weights in 8-bit integers, and a static range for each input. Only if 8 bits were asked for.

Where no layer runs anything but its own attention, the swaps leave, so that the model loads without this package.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...layer.smoothing import Smoothing
from ...measuring.batches import evaluating
from ...patch import unpatch_model
from ...quantization.linear import integers as kernel_dtype
from ...quantization.static import input_ranges, int8_static
from ...variants.softmax import Softmax
from ...wiring.install import model_root
from ..bits import batches
from ..engine import Part
from ..state import State
from .qat import RANGES


def integers(state: State) -> Iterator[Part]:
    """Put integers instead of the weights. From here on, there is no way back."""
    if state.config.bits is not None and state.swaps:
        yield Part("8-bit integers", _round, again=True)
        yield Part("swaps that change nothing", _leave_stock, measured=False, again=True)


def _round(state: State) -> None:
    ranges = {path: (low, high) for path, (low, high) in state.notes.get(RANGES, {}).items()}
    if not ranges:
        with evaluating(state.model):
            ranges = input_ranges(state.model, batches(state))
    state.final = True
    int8_static(state.model, ranges)
    root = model_root(state.model)
    if root.device.type == "cpu" and kernel_dtype() is None:
        state.say(
            "This processor has no fast product of 8-bit integers (VNNI), so the same numbers are computed in floating "
            "point: here the model is smaller, and not faster."
        )


def _leave_stock(state: State) -> None:
    """Take out swaps that are stock attention. The scales of a smoothing stay in the weights."""
    swaps = [swap for group in state.swaps.values() for swap in group]
    if any(swap.names != (Softmax.name,) or set(swap.fitted) - {Smoothing.name} for swap in swaps):
        return
    for swap in swaps:
        swap.drop(Smoothing.name)
    unpatch_model(state.model)
    state.say(
        "No attention is swapped, so the model is saved as one of transformers, which loads without this package."
    )
