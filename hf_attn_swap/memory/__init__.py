"""Hopfield layers as memory: retrieval, association, pooling and lookup, as modules that need no pretrained model.

STanHop-Net is a whole forecaster of such layers.
"""

from __future__ import annotations

from ..functional import no_op_patterns
from .layers import (
    NORMALIZERS,
    HopfieldAssociation,
    HopfieldLayer,
    HopfieldPooling,
    HopfieldRetrieval,
)
from .stanhop import STanHopConfig, STanHopForPrediction

__all__ = [
    "NORMALIZERS",
    "HopfieldAssociation",
    "HopfieldLayer",
    "HopfieldPooling",
    "HopfieldRetrieval",
    "STanHopConfig",
    "STanHopForPrediction",
    "no_op_patterns",
]
