"""A model type that the installed transformers may lack."""

from __future__ import annotations

import pytest
import transformers

from .tiny import registry


def named(model_type: str) -> str:
    """The model type, if this transformers has it."""
    if model_type not in registry():
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    return model_type
