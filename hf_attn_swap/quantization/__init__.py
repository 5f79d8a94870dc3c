"""8-bit weights and activations: the static fake quantisation of the papers, and torchao's integer kernels."""

from .fake import fake_w8a8
from .integer import int8_dynamic
from .points import Point, Quantized

__all__ = ["Point", "Quantized", "fake_w8a8", "int8_dynamic"]
