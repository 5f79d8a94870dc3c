"""Swap the attention of a loaded pretrained Hugging Face model, exactly."""

from . import functional, loading  # noqa: F401  # importing `loading` lets from_pretrained rebuild a saved swap
from .core.registry import list_variants
from .describe import describe
from .patch import patch_model, set_strength, unpatch_model
from .publish.hub import from_pretrained, push

__version__ = "0.1.0"
__all__ = [
    "describe",
    "from_pretrained",
    "functional",
    "list_variants",
    "patch_model",
    "push",
    "set_strength",
    "unpatch_model",
]
