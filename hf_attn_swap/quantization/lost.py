"""What a model loses in 8 bits as machines run them, on held-out rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..measuring.batches import evaluating
from ..measuring.held_out import HeldOut
from ..measuring.lost import Lost
from .linear import Int8Linear
from .machine import machine_w8a8


def lost_in_8_bits(
    model: nn.Module, batches: Iterable[Mapping[str, Any]], held: HeldOut, *, dynamic: bool = False
) -> Lost:
    """What a model loses in 8 bits, by fake quantisation; a model of 8-bit integers is measured as it is.

    Args:
        model: a `PreTrainedModel`, stock or swapped.
        batches: dicts of tensors, which give the ranges; not the rows that are measured.
        held: the rows, and what the model that others are measured against gives on them.
        dynamic: each token of an input has its own range, as in `machine_w8a8`.

    Raises:
        ValueError: as `machine_w8a8`.
    """
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        return held.lost(model)
    with evaluating(model), machine_w8a8(model, batches, dynamic=dynamic):
        return held.lost(model)
