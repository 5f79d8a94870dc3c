"""Puts a small program beside a saved model, so that it also loads where nobody imports this package.

transformers reads the key `auto_map` of config.json and, if the caller passes `trust_remote_code=True`, takes the
model's class from the file that the key names. Here this file is `attn_swap.py`, the same for every model: it imports
the package, and the files of the user's own variants (`own_file.py`), and hands out the class of transformers.

Other programs (vLLM, SGLang, llama.cpp, MLX) compute attention by themselves. They choose a model by the keys
`architectures` or `model_file` of config.json. A saved config.json therefore names "HfAttnSwapLlamaForCausalLM" instead
of "LlamaForCausalLM", and names the shim as `model_file`, so that these programs refuse the model. A config that is
read keeps these names, because such a program may read it in a process that has this package. The config of a model in
memory has the names that transformers knows.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from . import own_file

SOURCE = Path(__file__).with_name(own_file.SHIM)
FILE = SOURCE.name
CONFIG = "config.json"
KEY = "auto_map"
NAMES = "architectures"
PREFIX = "HfAttnSwap"
CODE = "model_file"  # MLX runs this file instead of its own model, and without trust it refuses the model
BLOCK = "attn_swap"
KEYS = (NAMES, KEY, CODE, BLOCK)
OWN = """
if {variant!r} not in hf_attn_swap.list_variants():
    from .{module} import __name__ as _  # transformers brings along what a line of this form names
"""


@functools.cache  # `dir(transformers)` takes 0.2 s, as long as ten saves of a small model
def auto_classes() -> tuple[Any, ...]:
    """The classes of transformers that choose a model's class by its config, such as `AutoModelForCausalLM`."""
    names = (name for name in dir(transformers) if name.startswith("AutoModel") or name == "AutoBackbone")
    found = (getattr(transformers, name) for name in names)
    return tuple(auto for auto in found if getattr(auto, "_model_mapping", None) is not None)


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
        saved = [cls for cls in choices if cls.__name__ in map(stock_name, config.architectures or ())]
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


def merge_auto_map(config: PreTrainedConfig, auto_map: Any) -> dict[str, Any] | None:
    """The `auto_map` with the shim's entries; None if the config gets no shim."""
    kept = others(auto_map)
    ours = {} if names_code(kept) else entries(config)
    return {**kept, **ours} if ours else None


def saved_name(name: str) -> str:
    """The name of a class in the config.json of a swapped model. No program has a class of this name."""
    return f"{PREFIX}{stock_name(name)}"


def stock_name(name: str) -> str:
    """The name of the same class in transformers."""
    return name.removeprefix(PREFIX)


def _renamed(config: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """The content of a config.json with other names of classes, also in the configs of a model's parts."""
    made = dict(config)
    for key, value in config.items():
        if isinstance(value, dict):
            made[key] = _renamed(value, change)
        elif key == NAMES and isinstance(value, list):
            made[key] = [change(name) if isinstance(name, str) else name for name in value]
    return made


def with_shim(
    config: dict[str, Any], auto_map: dict[str, Any] | None, own: Mapping[str, Path] | None = None
) -> dict[str, Any]:
    """The content of the config.json of a swapped model: names of classes that no program has, and the shim, if any.

    Args:
        config: the content without them.
        auto_map: from `merge_auto_map`.
        own: from `own_file.travelling`.
    """
    made = _renamed(config, saved_name)
    if BLOCK in made:
        block = {key: value for key, value in made[BLOCK].items() if key != own_file.KEY}
        files = {name: {"file": path.name, "sha256": own_file.digest(path)} for name, path in (own or {}).items()}
        made[BLOCK] = {**block, own_file.KEY: files} if files else block
    return made if auto_map is None else {CODE: FILE, **made, KEY: auto_map}


def without_code(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json without the entries that let `trust_remote_code=True` run the shim."""
    made = dict(config)
    kept = others(made.get(KEY))
    if isinstance(made.get(KEY), dict) and len(kept) < len(made[KEY]):
        del made[KEY]
        made |= {KEY: kept} if kept else {}
    return made


def as_read(config: dict[str, Any], known: own_file.Classes) -> dict[str, Any]:
    """The content of the config.json of a swapped model as a config of this process has it.

    The shim's code is left out, unless it brings a variant that is not `known`. The names of classes are those that no
    program has, also if an earlier version has saved the model with the names of transformers.
    """
    kept = config if own_file.unknown(config.get(BLOCK), known) else without_code(config)
    return _renamed(kept, saved_name)


def without(config: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json as transformers knows it: its names of classes, and no entries of the shim."""
    made = _renamed(without_code(config), stock_name)
    if made.get(CODE) == FILE:
        del made[CODE]
    return made


def parts(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """A config, and the configs of the model's parts."""
    yield config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if isinstance(part, PreTrainedConfig):
            yield from parts(part)


def forget(config: PreTrainedConfig) -> None:
    """`without`, in place, for the config of a model."""
    for part in parts(config):
        _put(part, without(_own(part)))


def _own(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys that this file changes, of a config without its parts."""
    return {key: config.__dict__[key] for key in KEYS if key in config.__dict__}


def _put(config: PreTrainedConfig, content: Mapping[str, Any]) -> None:
    """Let a config have exactly these of the keys that this file changes."""
    for key in KEYS:
        config.__dict__.pop(key, None)
    for key, value in content.items():
        setattr(config, key, value)


@contextlib.contextmanager
def as_saved(config: PreTrainedConfig, known: own_file.Classes) -> Iterator[dict[str, bytes]]:
    """Inside the `with` block, the config of a swapped model has the keys of its config.json.

    Gives the programs that belong beside config.json, by name; none if this model gets no shim.
    """
    auto_map = merge_auto_map(config, config.__dict__.get(KEY))
    own = {} if auto_map is None else own_file.travelling(config.__dict__[BLOCK], known)
    before = [(part, _own(part)) for part in parts(config)]
    try:
        for part, content in before:
            _put(part, with_shim(content, auto_map, own) if part is config else with_shim(content, None))
        yield {} if auto_map is None else programs(own)
    finally:
        for part, content in before:
            _put(part, content)


def programs(own: Mapping[str, Path]) -> dict[str, bytes]:
    """The shim, which imports the files of the user's own variants, and these files; by name."""
    lines = [OWN.format(variant=variant, module=path.stem) for variant, path in own.items()]
    text = SOURCE.read_text(encoding="utf-8") + "".join(lines)
    return {FILE: text.encode(), **{path.name: path.read_bytes() for path in own.values()}}


def completed(folder: Path, known: own_file.Classes) -> dict[str, bytes]:
    """A folder's config.json as `as_saved` has it, and the programs, by name; nothing if this model gets no shim."""
    content = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if BLOCK not in content or names_code(content.get(KEY) or {}) or content.get("model_type") not in CONFIG_MAPPING:
        return {}
    auto_map = merge_auto_map(AutoConfig.from_pretrained(folder), content.get(KEY))
    if auto_map is None:
        return {}
    own = own_file.travelling(content[BLOCK], known)
    config = json.dumps(with_shim(content, auto_map, own), indent=2, sort_keys=True) + "\n"
    return {CONFIG: config.encode(), **programs(own)}
