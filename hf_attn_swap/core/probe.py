"""Marks a tensor inside a module that has no swap, so that measurements see it and 8-bit quantisation rounds it."""

from __future__ import annotations

from torch import nn


class Probe(nn.Identity):
    """Passes a tensor on. Forward hooks can read or round it.

    Args:
        width: the number of products that each number of this tensor stands for: D for scores Q K^T, and for weights
            that are multiplied with values of width D; 0 if the tensor is no factor or result of a product of its own.
    """

    def __init__(self, width: int = 0) -> None:
        super().__init__()
        self.width = width
