"""8-bit weights and activations: fake quantisation as in papers and as on machines, and torchao's integer kernels."""

from .fake import fake_w8a8
from .integer import int8_dynamic
from .machine import machine_w8a8
from .points import Point, Quantized

__all__ = ["Point", "Quantized", "fake_w8a8", "int8_dynamic", "machine_w8a8"]
