"""Swap the attention of a loaded pretrained Hugging Face model, exactly."""

from typing import TYPE_CHECKING, Any

from . import functional, loading  # noqa: F401  # importing `loading` lets from_pretrained rebuild a saved swap
from .core.registry import list_variants
from .describe import describe
from .patch import patch_model, set_strength, unpatch_model
from .publish.hub import from_pretrained, push

if TYPE_CHECKING:
    from .conversion.convert import convert
    from .conversion.sensitivity import layer_sensitivity

__version__ = "0.1.0"
__all__ = [
    "convert",
    "describe",
    "from_pretrained",
    "functional",
    "layer_sensitivity",
    "list_variants",
    "patch_model",
    "push",
    "set_strength",
    "unpatch_model",
]


def __getattr__(name: str) -> Any:
    """`convert` and `layer_sensitivity` need the extra `train`, so they are imported when they are first used."""
    if name not in ("convert", "layer_sensitivity"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .conversion import convert, sensitivity

    return convert.convert if name == "convert" else sensitivity.layer_sensitivity
