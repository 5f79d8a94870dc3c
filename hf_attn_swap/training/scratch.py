"""Sizes of models that are trained from random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

OVERRIDES = "--config_overrides"


def json_object(text: str, option: str) -> dict[str, Any]:
    """An option's values.

    Raises:
        ValueError: the text is no JSON object.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as problem:
        raise ValueError(f"{option} must be a JSON object, got {text!r} ({problem}).") from None
    if not isinstance(found, dict):
        raise ValueError(f"{option} must be a JSON object, got {text!r}.")
    return found


def scratch_config(model: str, overrides: str, **values: Any) -> PreTrainedConfig:
    """The configuration of an architecture, such as "gpt2" or "vit", or of a pretrained model, at other sizes.

    Args:
        model: a folder or a model on the Hub, or an architecture's name in transformers, which needs no files.
        overrides: config values as a JSON object.
        values: of the task, such as `num_labels`.

    Raises:
        ValueError: overrides that are no JSON object, name what the configuration does not have or what the task
            sets, or change the width of a pretrained model's configuration that states the width of its heads.
    """
    wanted = json_object(overrides, OVERRIDES)
    by_name = model in CONFIG_MAPPING and not Path(model).is_dir()
    build = AutoConfig.for_model if by_name else AutoConfig.from_pretrained
    known = build(model)
    names = {*known.to_dict(), *known.attribute_map}
    for name in wanted:
        if name in values:
            raise ValueError(f"{OVERRIDES}: {name!r} follows from the data; it is {values[name]!r}.")
        if name not in names:
            raise ValueError(f"{OVERRIDES}: {type(known).__name__} has no {name!r}.")
    if not by_name and "hidden_size" in wanted and getattr(known, "head_dim", None) and "head_dim" not in wanted:
        raise ValueError(f"{OVERRIDES}: {model} states head_dim = {known.head_dim}; give it beside hidden_size.")
    return build(model, **{**values, **wanted})


def made_of(model: str, overrides: str, *more: str) -> str:
    """A model of random weights in words: its architecture, what differs from the usual sizes, and more."""
    sizes = [f"{name} {value}" for name, value in json_object(overrides, OVERRIDES).items()]
    return ", ".join([model, *sizes, *more])
