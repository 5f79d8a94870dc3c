"""Publish a converted model, and get it back unchanged."""

from .load import from_pretrained
from .push import push, push_folder

__all__ = ["from_pretrained", "push", "push_folder"]
