"""Step 10: the model in full precision teaches the model in 8 bits. Only if 8 bits were asked for, and tokens are left.

The student computes with 8-bit inputs and weights, as it will run. What trains are the parameters of one dimension
(norms, biases), and those of the variant, such as the pair of a sink: on SmolLM2 they bring about as much as all
weights, and take no memory. If it loses no less after the training, it gets its former values back.
docs/mathematics.md, section Quantisation to 8 bits.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from ...measuring.batches import evaluating
from ...quantization.static import input_ranges
from ...quantization.straight_through import straight_through
from ...wiring.install import model_root
from ..bits import batches
from ..engine import Found, Part
from ..lesson import exhausted
from ..parts import VECTORS, part_of, vectors_of
from ..state import State
from ..teacher import Teacher
from .distil import train

NAME, RANGES = "distilled in 8 bits", "ranges"
LEARNING_RATE = 1e-3  # measured on SmolLM2
TRAINED = (VECTORS, "swap")


def qat(state: State) -> Iterator[Part]:
    """Train with rounding, unless the loss in 8 bits is within the budget."""
    if not may_train(state) or state.within:
        return
    yield Part(NAME, _train)


def may_train(state: State) -> bool:
    """True if tokens are kept for a training with rounding, in float32: in half precision small steps are lost."""
    if state.config.bits is None or not state.swaps:
        return False
    return model_root(state.model).dtype == torch.float32 and not exhausted(state, whole=True)


def _train(state: State) -> Found:
    """Train, and keep what was learnt if less is lost in 8 bits. The ranges of the training stay those of the model."""
    state.budget.reserved = 0
    before, lost_before = state.snapshot(), state.record[-1].lost
    with evaluating(state.model):
        ranges = input_ranges(state.model, batches(state))
    state.taught = Teacher(state.student, state.teacher or _copied(model_root(state.model)))
    stage = dataclasses.replace(
        state.config.plan.last, rank=None, trainable=TRAINED, learning_rate=LEARNING_RATE, tokens=None
    )
    try:
        with straight_through(state.model, ranges):
            train(stage, state.budget.left, NAME, state)
            lost = state.lost()
    finally:
        state.taught = None
    if lost.degradation < lost_before.degradation:
        state.notes[RANGES] = {path: list(ends) for path, ends in ranges.items()}
        return Found(lost=lost)
    state.restore(before)
    return Found(f"{NAME}, taken back", lost_before)


def _copied(root: PreTrainedModel) -> PreTrainedModel:
    """The model before the rounding, with its swaps, which is nearer than the stock model. It shares what stays."""
    trained = {id(each) for each in vectors_of(root)}
    trained |= {id(each) for module in part_of(root, "swap") for each in module.parameters()}
    return copy.deepcopy(root, {id(each): each for each in root.parameters() if id(each) not in trained})
