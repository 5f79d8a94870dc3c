"""Swap the attention of a loaded pretrained Hugging Face model, exactly."""

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


def __getattr__(name: str) -> Any:
    """Import `convert`, `quantize`, `export` and `layer_sensitivity` when first used: they need the extra `train`.

    For this reason `__all__` leaves them out, so that `from hf_attn_swap import *` works without the extra.
    """
    if name not in ("convert", "quantize", "export", "layer_sensitivity"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from .conversion import convert, quantize, sensitivity
        from .engines import export
    except ModuleNotFoundError as missing:
        raise ImportError(f'{name} needs {missing.name}: pip install "hf-attn-swap[train]"') from missing
    return {
        "convert": convert.convert,
        "quantize": quantize.quantize,
        "export": export.export,
        "layer_sensitivity": sensitivity.layer_sensitivity,
    }[name]
