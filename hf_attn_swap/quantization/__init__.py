"""8-bit weights and activations: the papers' static fake quantisation, and integer kernels by torchao."""

from .fake import fake_w8a8
from .integer import int8_dynamic
from .points import Point, Quantized

__all__ = ["Point", "Quantized", "fake_w8a8", "int8_dynamic"]
