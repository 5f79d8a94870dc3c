"""Measures what an attention swap does to a model: outliers, similarity of tokens, entropy, geometry."""

from ..measuring.lost import Lost, lost
from .record import record
from .recording import Recording

__all__ = ["Lost", "Recording", "lost", "record"]
