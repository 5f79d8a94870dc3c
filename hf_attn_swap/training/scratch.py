"""Sizes of models that are trained from random weights."""

from __future__ import annotations

import json
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig


def scratch_config(model: str, overrides: str, **values: Any) -> PreTrainedConfig:
    """The configuration of an architecture, such as "gpt2" or "vit", or of a pretrained model, at other sizes.

    Args:
        model: an architecture's name in transformers, which needs no files, or a model on the Hub or in a folder.
        overrides: config values as a JSON object, which win.
        values: of the task, such as `num_labels`.

    Raises:
        ValueError: overrides that are no JSON object, or name what the configuration does not have.
    """
    try:
        wanted = json.loads(overrides)
    except json.JSONDecodeError as problem:
        raise ValueError(f"--config_overrides must be a JSON object, got {overrides!r} ({problem}).") from None
    if not isinstance(wanted, dict):
        raise ValueError(f"--config_overrides must be a JSON object, got {overrides!r}.")
    build = AutoConfig.for_model if model in CONFIG_MAPPING else AutoConfig.from_pretrained
    known = build(model)
    if unknown := [name for name in wanted if not hasattr(known, name)]:
        raise ValueError(f"--config_overrides: {type(known).__name__} has no {unknown[0]!r}.")
    return build(model, **{**values, **wanted})
