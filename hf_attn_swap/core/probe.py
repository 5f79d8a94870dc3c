"""Marks a tensor inside a module that has no swap, so that measurements see it and 8-bit quantisation rounds it."""

from __future__ import annotations

from torch import nn


class Probe(nn.Identity):
    """Passes a tensor on. Forward hooks can read or round it."""
