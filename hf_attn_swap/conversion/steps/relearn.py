"""Step 9: the model in full precision teaches the model in 8 bits. Only if 8 bits were asked for, and tokens are left.

The student computes with 8-bit inputs and weights, as it will run. If it loses no less after the training, it gets its
former weights back. docs/mathematics.md, section Quantisation to 8 bits.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import torch

from ...measuring.batches import evaluating
from ...quantization.static import input_ranges
from ...quantization.straight_through import straight_through
from ...wiring.install import model_root
from ..bits import batches, lost_in_bits
from ..engine import Found, Part
from ..lesson import exhausted
from ..parts import BODY
from ..plan import MIDDLE
from ..state import State
from ..teacher import Teacher
from .distil import train

NAME = "distilled in 8 bits"
LEARNING_RATE = 2e-5  # measured on SmolLM2


def relearn(state: State) -> Iterator[Part]:
    """Train with rounding, unless the loss in 8 bits is within the budget."""
    if not may_train(state) or state.within:
        return
    yield Part(NAME, _train)


def may_train(state: State) -> bool:
    """True if tokens are kept for a training with rounding, and the weights can train."""
    if state.asked.bits is None or not state.swaps or state.asked.low_memory:
        return False
    root = model_root(state.model)
    return root.dtype == torch.float32 and root.num_parameters() <= MIDDLE and not exhausted(state, whole=True)


def _train(state: State) -> Found:
    """Train, and keep what was learnt if less is lost in 8 bits."""
    state.budget.reserved = 0
    before, lost_before = state.snapshot(), state.record[-1].lost
    with evaluating(state.model):
        ranges = input_ranges(state.model, batches(state))
    # The copy is the model before the rounding, with its swaps: it is nearer than the stock model.
    state.taught = Teacher(state.student, state.teacher or copy.deepcopy(model_root(state.model)))
    stage = dataclasses.replace(
        state.asked.plan.last, rank=None, trainable=(BODY,), learning_rate=LEARNING_RATE, tokens=None
    )
    try:
        with straight_through(state.model, ranges):
            train(stage, state.budget.left, NAME, state)
    finally:
        state.taught = None
    lost = lost_in_bits(state)
    if lost.share < lost_before.share:
        return Found(lost=lost)
    state.restore(before)
    return Found(f"{NAME}, taken back", lost_before)
