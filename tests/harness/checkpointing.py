"""Activation checkpointing, switched on under the name that the installed transformers has for it."""

from __future__ import annotations

from typing import Any

from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import fresh

ABLE = [name for name in FAMILY_NAMES if fresh(name).supports_gradient_checkpointing]  # transformers decides


def enable(model: Any, **arguments: Any) -> None:
    """Under the name that this transformers does not warn about."""
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(**arguments)
    else:
        kinds = {"activation_checkpointing_kwargs": "gradient_checkpointing_kwargs"}
        model.gradient_checkpointing_enable(**{kinds[key]: value for key, value in arguments.items()})
