"""8-bit weights and activations: fake quantisation as in papers and as on machines, and integers that run."""

from .checkpoint import int8_loaded
from .fake import fake_w8a8
from .linear import Int8Linear
from .lost import lost_in_8_bits
from .machine import machine_w8a8
from .points import Point
from .static import input_ranges, int8_dynamic, int8_static
from .straight_through import straight_through

__all__ = [
    "Int8Linear",
    "Point",
    "fake_w8a8",
    "input_ranges",
    "int8_dynamic",
    "int8_loaded",
    "int8_static",
    "lost_in_8_bits",
    "machine_w8a8",
    "straight_through",
]
