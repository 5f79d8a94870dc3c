"""Lets the file of a user's own variant travel with a saved model.

The file is copied beside the weights, and the shim imports it, so that transformers brings it along for a caller who
passes `trust_remote_code=True`. config.json has the file's name and digest, by which loading names the file if the
variant is unknown, and refuses another variant of the same name.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.dynamic_module_utils import get_imports, get_relative_imports

KEY = "files"
SHIM = "attn_swap.py"
Classes = Mapping[str, type]  # variants by name


def source(cls: type) -> Path | None:
    """The file that defines a class; None for a class of a notebook or of a console."""
    path = Path(getattr(sys.modules.get(cls.__module__), "__file__", None) or "")
    return path if path.suffix == ".py" and path.is_file() else None


def digest(path: Path) -> str:
    """The SHA-256 of a file's text, whatever ends its lines."""
    return hashlib.sha256(path.read_text(encoding="utf-8").encode()).hexdigest()


def travelling(block: Mapping[str, Any], known: Classes) -> dict[str, Path]:
    """The files of the user that go with a model, by the variants that they define.

    A variant of the user whose file cannot go gives a warning.

    Args:
        block: what config.json says of the swaps.
        known: the registered variants.
    """
    files: dict[str, Path] = {}
    for name in dict.fromkeys(name for swap in block.get("swaps", ()) for name in swap["variant"].split("+")):
        cls = known.get(name)
        if cls is None or _installed(cls.__module__):
            continue
        path = source(cls)
        if cls.__module__ == "__main__" or path is None:
            problem = "it is defined in a notebook or in the program that runs"
        elif not path.stem.isidentifier() or path.name in {SHIM, *(p.name for p in files.values() if p != path)}:
            problem = f"{path.name} cannot be the name of its file there"
        elif needed := [f".{part}" for part in get_relative_imports(path)] + _foreign(path):
            problem = f"{path.name} imports {', '.join(needed)}"
        else:
            files[name] = path
            continue
        warnings.warn(
            f"the variant {name!r} is not saved with the model, because {problem}; define it in a file of its own that "
            "imports installed packages alone, or import it wherever the model is loaded.",
            stacklevel=2,
        )
    return files


def unknown(block: Any, known: Classes) -> bool:
    """True if a block, which may come from a stranger, names a file whose variant is not registered."""
    files = block.get(KEY) if isinstance(block, dict) else None
    return isinstance(files, dict) and not files.keys() <= known.keys()


def _installed(module: str) -> bool:
    """True for a module that comes with Python or with a distribution: who loads the model installs it, too."""
    top = module.partition(".")[0]
    return top == __name__.partition(".")[0] or top in sys.stdlib_module_names or top in _distributed()


@functools.cache  # asking takes half a second
def _distributed() -> frozenset[str]:
    return frozenset(importlib.metadata.packages_distributions())


def _foreign(path: Path) -> list[str]:
    """The modules that a file imports and that are not installed."""
    return [module for module in get_imports(path) if not _installed(module)]
