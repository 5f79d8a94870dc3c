"""Swap the attention of a loaded pretrained Hugging Face model, exactly."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import functional, loading  # noqa: F401  # importing `loading` lets from_pretrained rebuild a saved swap
from .describe import describe
from .doctor import doctor
from .layer.registry import list_variants
from .patch import patch_model, set_strength, unpatch_model
from .publish.hub import push

if TYPE_CHECKING:
    from .conversion.convert import convert as convert
    from .conversion.quantize import quantize as quantize
    from .conversion.sensitivity import layer_sensitivity as layer_sensitivity
    from .engines.export import export as export

__version__ = "0.1.0"
__all__ = [
    "describe",
    "doctor",
    "functional",
    "list_variants",
    "patch_model",
    "push",
    "set_strength",
    "unpatch_model",
]


# Where the functions are that need the extra `train`, or are slow to import.
_LATER = {
    "convert": ".conversion.convert",
    "quantize": ".conversion.quantize",
    "export": ".engines.export",
    "layer_sensitivity": ".conversion.sensitivity",
}


def __getattr__(name: str) -> Any:
    """Import `convert`, `quantize`, `export` and `layer_sensitivity` when first used.

    For this reason `__all__` leaves them out, so that `from hf_attn_swap import *` works without the extra `train`.
    """
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_LATER[name], __name__), name)
    except ModuleNotFoundError as missing:
        from .text.typed import install

        raise ImportError(f"{name} needs {missing.name}: {install('train')}") from missing
