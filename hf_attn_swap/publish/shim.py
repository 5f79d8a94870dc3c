"""Puts a small program beside a saved model, so that it also loads where nobody imports this package.

transformers reads the key `auto_map` of config.json and, if the caller passes `trust_remote_code=True`, takes the
model's class from the file that the key names. Here this file is `attn_swap.py`, the same for every model: it imports
the package and hands out the class of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

SOURCE = Path(__file__).with_name("attn_swap.py")
FILE = SOURCE.name
CONFIG = "config.json"
KEY = "auto_map"


def auto_classes() -> list[Any]:
    """The classes of transformers that choose a model's class by its config, such as `AutoModelForCausalLM`."""
    names = (name for name in dir(transformers) if name.startswith("AutoModel") or name == "AutoBackbone")
    found = (getattr(transformers, name) for name in names)
    return [auto for auto in found if getattr(auto, "_model_mapping", None) is not None]


def entries(config: PreTrainedConfig) -> dict[str, str]:
    """What `auto_map` says so that each auto class of this architecture loads through the shim.

    Auto classes whose model takes only a part of the config, such as the text model of a vision-language model, are
    left out: a swap counts the attention modules of the whole model. A config class from outside transformers gives
    nothing, because its own code has to be imported anyway.
    """
    kind = type(config)
    if not kind.__module__.startswith("transformers."):
        return {}
    found = {}
    for auto in auto_classes():
        if kind not in auto._model_mapping:
            continue
        classes = auto._model_mapping[kind]
        choices = list(classes) if isinstance(classes, (list, tuple)) else [classes]
        saved = [cls for cls in choices if cls.__name__ in (config.architectures or ())]
        cls = (saved or choices)[0]
        if cls.config_class is kind and hasattr(transformers, cls.__name__):
            found[auto.__name__] = f"{SOURCE.stem}.{cls.__name__}"
    return found


def is_ours(reference: Any) -> bool:
    """True if an entry of `auto_map` names the shim, in this repository or, as "repository--file.Class", in another."""
    return isinstance(reference, str) and reference.rpartition("--")[2].startswith(f"{SOURCE.stem}.")


def others(auto_map: Any) -> dict[str, Any]:
    """The entries of an `auto_map` that do not name the shim."""
    if not isinstance(auto_map, dict):
        return {}
    return {name: value for name, value in auto_map.items() if not is_ours(value)}


def names_code(auto_map: Mapping[str, Any]) -> bool:
    """True if a model or its config is to be loaded from other code than the shim."""
    return any(name == "AutoConfig" or name.startswith("AutoModel") for name in others(auto_map))


def merged(config: PreTrainedConfig, auto_map: Any) -> dict[str, Any] | None:
    """The `auto_map` with the shim's entries; None if the config gets no shim."""
    kept = others(auto_map)
    ours = {} if names_code(kept) else entries(config)
    return {**kept, **ours} if ours else None


def without(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json without the shim's entries."""
    auto_map = config.get(KEY)
    kept = others(auto_map)
    if not isinstance(auto_map, dict) or len(kept) == len(auto_map):
        return config
    rest = {key: value for key, value in config.items() if key != KEY}
    return {**rest, KEY: kept} if kept else rest


def forget(config: PreTrainedConfig) -> None:
    """Remove the shim's entries from a config, in place."""
    kept = without(config.__dict__)
    if KEY in kept:
        config.auto_map = kept[KEY]
    else:
        config.__dict__.pop(KEY, None)


def write(folder: Path) -> None:
    """Write the shim's file into a folder."""
    (folder / FILE).write_bytes(SOURCE.read_bytes())


def completed(folder: Path) -> str | None:
    """The content of a folder's config.json with the shim's entries; None if this model gets no shim."""
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if names_code(content.get(KEY) or {}) or content.get("model_type") not in CONFIG_MAPPING:
        return None
    auto_map = merged(AutoConfig.from_pretrained(folder), content.get(KEY))
    return None if auto_map is None else json.dumps({**content, KEY: auto_map}, indent=2, sort_keys=True) + "\n"
