"""Lets plain `from_pretrained` rebuild a saved swap. This is the only file that changes a transformers class.

After `PreTrainedModel.post_init`, which ends every constructor, a model whose config holds the block `attn_swap` gets
its swaps, before any weights load. After `PreTrainedModel.from_pretrained`, every weight of the swaps must have come
from the checkpoint. `PreTrainedConfig.save_pretrained` also writes the shim (`saved/shim.py`) beside config.json, and
`PreTrainedConfig.from_dict` reads a config without the shim's entries: this process has the package, so it runs nothing
from the repository. In config.json the model's class has a name that no other program knows, also when it is read; the
config of a model in memory has the class's own name.
All four do nothing for any other config. `PreTrainedModel.save_pretrained` writes the block of exactly the swaps inside
(`saving.py`). The block is data: this file checks all of it, and nothing of the block is executed or imported by name.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from .core.checks import check_keys, is_whole
from .layer.fitted import FITTED
from .layer.registry import Options, canonical_keys, parse, parse_options
from .layer.swap import Swap
from .patch import build_swap, check_strength
from .saved import own_file, shim
from .saving import described
from .variants.base import VARIANTS, Variant
from .wiring import implementations
from .wiring.adapters import warn_alone
from .wiring.device_and_dtype import device_and_dtype
from .wiring.install import ATTRIBUTE, VERSION, Installation, Record

ABSENT = object()
LIMIT = 100_000  # no model has more attention modules, so a larger number comes from a damaged file
PLACE = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
SHOWN = 3  # how many weights an error names
LONGEST = 400  # the largest number of characters that an error quotes from a damaged file
KEYS = {"variant", "layers", "options", "strength"}
OPTIONAL_KEYS = {"modules", "retrained"}  # beside the names of fits
REMOVED = {"head_order": "matched heads", "neutral_start": "a neutral start"}  # fits of earlier versions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """One entry of the block: the same swap in one or several layers.

    Attributes:
        classes: the variants.
        options: the options of each variant, by the variant's name, complete with defaults.
        layers: the numbers of the layers, counted over the whole model.
        strength: the strength, from 0 to 1.
        modules: the argument `modules` that chose the layers, or None.
        fitted: what the entry says of each fit, checked, by the fit's name.
        retrained: True if a distillation changed weights.
    """

    classes: tuple[type[Variant], ...]
    options: Options
    layers: list[int]
    strength: float
    modules: str | None
    fitted: dict[str, Any]
    retrained: bool


def read_block(block: Any) -> tuple[int, list[Entry]]:
    """Check the block `attn_swap` of a config.

    Returns:
        The number of modules that can be swapped, and the swaps.

    Raises:
        ValueError: something in the block is missing, unknown, of the wrong type or outside its range, or a newer
            version of this package wrote the block.
    """
    if isinstance(block, dict) and is_whole(block.get("version")) and block["version"] > VERSION:
        raise ValueError(
            f"attn_swap: this checkpoint has version {block['version']} and was made by a newer hf_attn_swap (this one "
            f"reads version {VERSION}); upgrade with pip install -U hf-attn-swap."
        )
    try:
        return _read(block)
    except ValueError as problem:
        raise _damaged(problem) from None


def _read(block: Any) -> tuple[int, list[Entry]]:
    """As `read_block`. An error says what is wrong in one sentence, which `_damaged` puts into its own."""
    files = {own_file.KEY} & set(block) if isinstance(block, dict) else set()
    check_keys(block, {"version", "modules", "swaps"} | files, "the block")
    if not is_whole(block["version"]) or block["version"] != VERSION:
        raise ValueError(f"version must be {VERSION}, got {block['version']!r}.")
    modules, swaps = block["modules"], block["swaps"]
    if not is_whole(modules) or not 0 < modules <= LIMIT:
        raise ValueError(f"modules must be a positive whole number, got {modules!r}.")
    if not isinstance(swaps, list) or not 0 < len(swaps) <= modules:
        raise ValueError(f"swaps must be a list of one to {modules} entries.")
    if files:
        _check_files(block[own_file.KEY])
    entries, seen = [], set[int]()
    for entry in swaps:
        entries.append(_read_swap(entry, modules))
        if seen & set(entries[-1].layers):
            raise ValueError("a layer is swapped twice.")
        seen |= set(entries[-1].layers)
    return modules, entries


def _check_files(files: Any) -> None:
    """Check that the variants of the user's own files are those with which the model was saved."""
    if not isinstance(files, dict):
        raise ValueError(f"files must be a dict, got {type(files).__name__}.")
    for name, entry in files.items():
        check_keys(entry, {"file", "sha256"}, f"the file of {name}")
        cls = VARIANTS.get(name)
        if cls is None:
            raise ValueError(
                f"the variant {name!r} is not known here; its file {entry['file']} lies beside config.json: load the "
                "model by an AutoModel class with trust_remote_code=True, or import that file first."
            )
        here = own_file.source(cls)
        if here is None or own_file.digest(here) != entry["sha256"]:
            raise ValueError(
                f"this process knows another variant {name!r}, from {cls.__module__}, than {entry['file']} "
                "beside config.json; load the model in a process without it. To run yours, delete 'files' there."
            )


def _read_swap(entry: Any, modules: int) -> Entry:
    """Check one entry of the block, for a model with `modules` modules that can be swapped."""
    given = set(entry) if isinstance(entry, dict) else set()
    for name in given & REMOVED.keys():
        raise ValueError(
            f"it was saved by an earlier version with {REMOVED[name]} ({name}), which this version cannot run; convert "
            "the pretrained model anew, or install the version that saved it."
        )
    check_keys(entry, KEYS | ((OPTIONAL_KEYS | set(FITTED)) & given), "a swap")
    layers, options = entry["layers"], entry["options"]
    if not isinstance(layers, list) or not layers or not all(is_whole(i) and 0 <= i < modules for i in layers):
        raise ValueError(f"layers must be whole numbers from 0 to {modules - 1}.")
    if len(set(layers)) != len(layers):
        raise ValueError("a layer is swapped twice.")
    classes = parse(entry["variant"])
    options = canonical_keys(options) if isinstance(options, dict) else options
    check_keys(options, {cls.name for cls in classes}, "the options")
    for cls in classes:
        if not isinstance(options[cls.name], dict):
            raise ValueError(f"the options of {cls.name} must be a dict; an option that it leaves out has its default.")
    chosen = parse_options(classes, options if len(classes) > 1 else options[classes[0].name])
    strength = check_strength(entry["strength"])
    if "retrained" in entry and entry["retrained"] is not True:
        raise ValueError(f"retrained must be true or absent, got {entry['retrained']!r}.")
    pattern = entry.get("modules")
    if "modules" in entry and (not isinstance(pattern, str) or not 0 < len(pattern) <= LONGEST):
        raise ValueError(f"modules must be a pattern of module paths, got {pattern!r}.")
    fitted = {name: entry[name] for name in FITTED if name in entry}
    for name, spec in fitted.items():
        FITTED[name].check(spec, classes, strength)
    return Entry(
        classes=classes,
        options=chosen,
        layers=layers,
        strength=strength,
        modules=pattern,
        fitted=fitted,
        retrained=entry.get("retrained", False),
    )


def _damaged(problem: ValueError) -> ValueError:
    """The error for a block that cannot be used, with what is wrong in it."""
    what = str(problem).removesuffix(".")
    shown = what if len(what) <= LONGEST else f"{what[:LONGEST]}..."
    return ValueError(f"attn_swap: the swap described in config.json cannot be used: {shown}.")


def _rebuild(model: PreTrainedModel, block: Any) -> None:
    """Attach the swaps that the config describes. Their weights load later.

    Raises:
        ValueError: the block cannot be used, or the caller asked for another attention implementation.
    """
    modules, entries = read_block(block)
    installation = Installation(model, Record(loaded=True))
    every = installation.numbered()
    if len(every) != modules:
        # This model is a part of a larger model. The larger model attaches the swaps at the end of its constructor.
        # Until then, the attention function refuses to run.
        return
    if not implementations.accepted(model.config._attn_implementation):
        raise ValueError(
            f"this checkpoint was converted with hf_attn_swap and cannot run with "
            f"attn_implementation={model.config._attn_implementation!r}; leave that argument out."
        )
    swaps = {}
    for entry in entries:
        for index in entry.layers:
            layer = every[index]
            swap = build_swap(layer, entry.classes, entry.options, strength=entry.strength, selection=entry.modules)
            swap.retrained = entry.retrained
            at = device_and_dtype(layer.site.container, layer.site.core)
            try:
                for name, spec in entry.fitted.items():
                    with at.device:
                        fit = FITTED[name].from_spec(spec, swap.geometry)
                    swap.put(fit.placed_like(at))
            except ValueError as problem:
                raise _damaged(problem) from None
            swaps[layer] = swap
    installation.start(model)
    installation.put(swaps)


def _check_loaded(model: nn.Module, info: dict[str, Any], where: str) -> None:
    """Check that every weight of the swaps came from the checkpoint.

    Raises:
        ValueError: some weights are missing, are left over or have another shape, or the swap could not be rebuilt.
    """
    described = getattr(getattr(model, "config", None), "attn_swap", None) is not None
    if described and model.__dict__.get(ATTRIBUTE) is None:
        raise ValueError(
            f"{where}: the swap in config.json was made for another model than {type(model).__name__} (another number "
            "of attention modules); load the class that was saved."
        )
    if described and info.get("missing_keys") and info.get("unexpected_keys"):
        saved, opened = model.config.model_type, type(model.config).model_type  # type: ignore[union-attr]  # described
        if saved != opened:
            raise ValueError(
                f"{where}: a model of the type {saved!r}, but {type(model).__name__} is of the type {opened!r}; "
                "load it with the class that was saved, or with an AutoModel class."
            )
    for kind in ("missing", "unexpected", "mismatched"):
        keys = (key if isinstance(key, str) else key[0] for key in info.get(f"{kind}_keys") or ())
        if wrong := sorted(key for key in keys if ".attn_swap." in f".{key}"):
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise ValueError(f"{where}: {kind} weights of the swapped attention: {', '.join(wrong[:SHOWN])}{more}.")
    for module in model.modules():
        if isinstance(module, Swap):
            module.fresh = False
            module.refill()
    for module in model.modules():
        record = module.__dict__.get(ATTRIBUTE)
        if isinstance(record, Record) and isinstance(module, PreTrainedModel):
            Installation(module, record).stored(where)


def _run_integers(model: PreTrainedModel) -> None:
    """Let a swapped model with 8-bit integers compute with integers, and not as compressed-tensors would run it.

    That package copies what the layers of a pass share (`quantization/checkpoint.py`).
    """
    if model.__dict__.get(ATTRIBUTE) is None or getattr(model, "hf_quantizer", None) is None:
        return
    from .quantization.checkpoint import int8_loaded, stored_integers  # here alone: hardly any model needs it

    if any(stored_integers(module) is not None for module in model.modules()):
        int8_loaded(model)


def _with_swap_of(path: Any, config: Any, arguments: dict[str, Any]) -> Any:
    """The config that a caller gave for the checkpoint at `path`, with the swap of this checkpoint.

    A config of another model knows nothing of the swap, and the weights would run with stock attention.

    Args:
        path: the checkpoint.
        config: a config, or the place of one.
        arguments: the arguments of `from_pretrained`.

    Raises:
        ValueError: the config describes another swap than the checkpoint; or it lies in another place and has none.
    """
    loaded = isinstance(config, PreTrainedConfig)
    where = config.name_or_path if loaded else config
    if str(where) == str(path) and not (loaded and Path(path).is_dir()):
        return config  # it was read from there, as every auto class does, and asking again may cost a request
    saved = _block_at(path, arguments)
    if saved is None:
        return config
    given = config.__dict__.get("attn_swap") if loaded else _block_at(config, {})
    if given is not None:
        _refuse_another(path, given, saved)
        return config
    if not loaded:
        raise ValueError(
            f"{path}: the attention of this checkpoint is swapped, and the config at {config} says nothing of it; "
            "leave config= out, or load the config with AutoConfig and give the object."
        )
    config = copy.deepcopy(config)
    config.attn_swap, config.attn_implementation = saved, implementations.NAME
    config._attn_implementation = implementations.NAME
    return config


def _block_at(path: Any, arguments: dict[str, Any]) -> Any:
    """The block in the config.json of a checkpoint; None without a block or without a config.json."""
    try:
        content, _ = PreTrainedConfig.get_config_dict(path, **{k: arguments[k] for k in PLACE if k in arguments})
    except OSError:  # weights alone, which is why the caller gives a config
        return None
    return content.get("attn_swap")


def _refuse_another(path: Any, given: Any, saved: Any) -> None:
    """Compare two blocks. The strength may differ, because a user may set it.

    Raises:
        ValueError: the blocks describe other swaps.
    """
    one, other = (
        {layer: dataclasses.replace(swap, layers=[], strength=1.0) for swap in swaps for layer in swap.layers}
        for _, swaps in map(read_block, (given, saved))
    )
    if one != other:
        raise ValueError(
            f"{path}: the config that was given describes another swap than the checkpoint; leave config= out, and "
            "call patch_model on the loaded model for another attention."
        )


def _wrap_post_init() -> None:
    """Let every constructor attach the swaps that its config describes."""
    original = PreTrainedModel.post_init

    @functools.wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        block = self.config.__dict__.get("attn_swap", ABSENT)
        if block is not ABSENT:
            # Inner models have attached their swaps already. They are removed here, because the numbers of the layers
            # count over the outermost model.
            for module in list(self.modules()):
                if isinstance(inner := module.__dict__.get(ATTRIBUTE), Record):
                    inner.loaded = False
                    assert isinstance(module, PreTrainedModel)
                    Installation(module, inner).remove()
            shim.forget(self.config)
        original(self)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        if block is not ABSENT:
            _rebuild(self, block)

    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]  # the one documented exception


def _wrap_from_pretrained() -> None:
    """Let `from_pretrained` check that every weight of the swaps arrived."""
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]  # a classmethod has one

    @functools.wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("output_loading_info", False)
        _leave_out_none(kwargs)
        path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        if kwargs.get("config") is not None and path is not None and kwargs.get("gguf_file") is None:
            kwargs["config"] = _with_swap_of(path, kwargs["config"], kwargs)
        model, info = original(cls, *args, output_loading_info=True, **kwargs)
        _check_loaded(model, info, str(path))
        _run_integers(model)
        return (model, info) if wanted else model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment, method-assign]  # as above


def _leave_out_none(arguments: dict[str, Any]) -> None:
    """Leave out `attn_implementation=None`: tools pass it for "no wish", and it would undo the config's own."""
    if arguments.get("attn_implementation", ABSENT) is None:
        del arguments["attn_implementation"]


def _wrap_save_config() -> None:
    """Let the config of a swapped model write the shim beside itself, and a class that other programs refuse.

    Every way to save a model writes its config, in one process only, and before anything is uploaded.
    """
    original = PreTrainedConfig.save_pretrained

    @functools.wraps(original)
    def save_pretrained(
        self: PreTrainedConfig, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        if "attn_swap" not in self.__dict__:
            original(self, save_directory, *args, **kwargs)
            return
        with shim.as_saved(self, VARIANTS) as programs:
            original(self, save_directory, *args, **kwargs)
        for name, content in programs.items():
            (Path(save_directory) / name).write_bytes(content)

    PreTrainedConfig.save_pretrained = save_pretrained  # type: ignore[method-assign]  # as above


def _wrap_save_model() -> None:
    """Let every saved model, part or head describe exactly the swaps inside, or stop before anything is written."""
    original = PreTrainedModel.save_pretrained

    @functools.wraps(original)
    def save_pretrained(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        place = args[0] if args else kwargs.get("save_directory")
        record = self.__dict__.get(ATTRIBUTE)
        if self._hf_peft_config_loaded:  # the adapter alone is saved
            if isinstance(record, Record):
                warn_alone(self, 'model.save_pretrained("converted")  # before add_adapter')
            return original(self, *args, **kwargs)
        with described(self):
            result = original(self, *args, **kwargs)
        if isinstance(record, Record):
            Installation(self, record).stored(place)
        return result

    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]  # as above


def _wrap_read_config() -> None:
    """Let a config that describes a swap forget the shim's code: this process needs no program to load the model.

    The names of classes are those of a saved swap, in an older checkpoint too: a program with attention of its own,
    which reads the config in this process, must not take its own model of the stock name.
    """
    original = PreTrainedConfig.from_dict.__func__  # type: ignore[attr-defined]  # a classmethod has one

    @functools.wraps(original)
    def from_dict(cls: type[PreTrainedConfig], config_dict: dict[str, Any], **kwargs: Any) -> Any:
        swapped = "attn_swap" in config_dict
        if swapped:
            _leave_out_none(kwargs)
        return original(cls, shim.as_read(config_dict, VARIANTS) if swapped else config_dict, **kwargs)

    PreTrainedConfig.from_dict = classmethod(from_dict)  # type: ignore[arg-type, assignment, method-assign]  # as above


_wrap_post_init()
_wrap_from_pretrained()
_wrap_save_model()
_wrap_save_config()
_wrap_read_config()
