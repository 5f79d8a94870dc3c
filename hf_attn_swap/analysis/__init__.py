"""Measures what an attention swap does to a model: outliers, similarity of tokens, entropy, geometry, long context."""

from ..measuring.generation import continuations, tasks
from ..measuring.lost import Lost, lost
from ..measuring.recall import Recall, recall
from ..measuring.retrieval import KeyValues, Needle, key_values, needle
from .callback import OutlierCallback
from .record import record
from .recording import Recording

__all__ = [
    "KeyValues",
    "Lost",
    "Needle",
    "OutlierCallback",
    "Recall",
    "Recording",
    "continuations",
    "key_values",
    "lost",
    "needle",
    "recall",
    "record",
    "tasks",
]
