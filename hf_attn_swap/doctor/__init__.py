"""Says what is installed beside what was tested, and checks that every attention is right in this installation."""

from .cells import Cell, Check
from .diagnosis import Diagnosis, doctor
from .installed import Package

__all__ = ["Cell", "Check", "Diagnosis", "Package", "doctor"]
