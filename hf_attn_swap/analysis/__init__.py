"""Measures what an attention swap does to a model: outliers, similarity of tokens, entropy, geometry, recall."""

from ..measuring.lost import Lost, lost
from ..measuring.recall import Recall, recall
from .record import record
from .recording import Recording

__all__ = ["Lost", "Recall", "Recording", "lost", "recall", "record"]
