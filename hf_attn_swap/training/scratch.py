"""Configurations of models at other sizes, most of which are trained from random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

OVERRIDES = "--config_overrides"


def json_object(text: str, option: str) -> dict[str, Any]:
    """Read the value of an option that takes a JSON object.

    Raises:
        ValueError: the text is not a JSON object.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as problem:
        raise ValueError(f"{option} must be a JSON object, got {text!r} ({problem}).") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, got {text!r}.")
    return value


def scratch_config(model: str, overrides: str, *, scratch: bool = True, **values: Any) -> PreTrainedConfig:
    """The configuration of an architecture or of a pretrained model, at other sizes.

    Args:
        model: a folder, the name of a model on the Hub, or the name of an architecture in transformers, such as "gpt2"
            or "vit", which needs no files.
        overrides: values of the configuration, as a JSON object.
        scratch: False reads a pretrained model alone, also where an architecture has the same name.
        values: values that the task sets, such as `num_labels`.

    Raises:
        ValueError: `overrides` is not a JSON object, names a value that the configuration does not have or that the
            task sets, or changes the width of a pretrained model without the width of a head, which the model's
            configuration states by itself.
    """
    wanted = json_object(overrides, OVERRIDES)
    by_name = scratch and model in CONFIG_MAPPING and not Path(model).is_dir()
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
    """Describe a model of random weights in words: its architecture, the sizes that were changed, and `more`."""
    sizes = [f"{name} {value}" for name, value in json_object(overrides, OVERRIDES).items()]
    return ", ".join([model, *sizes, *more])
