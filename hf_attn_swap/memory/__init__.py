"""Hopfield layers as memory: retrieval, association, pooling and lookup, as modules that need no pretrained model."""

from __future__ import annotations

from ..functional import no_op_patterns
from .layers import (
    NORMALIZERS,
    HopfieldAssociation,
    HopfieldLayer,
    HopfieldPooling,
    HopfieldRetrieval,
)

__all__ = [
    "NORMALIZERS",
    "HopfieldAssociation",
    "HopfieldLayer",
    "HopfieldPooling",
    "HopfieldRetrieval",
    "no_op_patterns",
]
