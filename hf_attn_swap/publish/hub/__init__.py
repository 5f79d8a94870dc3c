"""Publishes a converted model on the Hub, and loads a published model unchanged."""

from .load import from_pretrained
from .push import push, push_folder

__all__ = ["from_pretrained", "push", "push_folder"]
