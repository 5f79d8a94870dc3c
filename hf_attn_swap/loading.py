"""Plain `from_pretrained` rebuilds the swap: the only place that changes a transformers class.

`PreTrainedModel.post_init` (the end of every constructor) rebuilds the swap for a config that carries `attn_swap`,
before any weights load; `PreTrainedModel.from_pretrained` checks afterwards that every weight of it arrived. Both
do nothing for any other config. Nothing of the block is executed or imported by name: it is data, checked here.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .core.calibration import check_fit
from .core.registry import Options, parse, parse_options
from .core.swap import Swap
from .families import sites
from .patch import build_swap, check_strength
from .variants.base import Variant
from .wiring import seam
from .wiring.install import ATTRIBUTE, VERSION, Installation, Record

ABSENT = object()
LIMIT = 100_000  # no model has more attention modules; a larger count is a damaged file
LONGEST = 400  # characters of an error: what is damaged may be long
KEYS = {"variant", "layers", "options", "strength"}
OPTIONAL_KEYS = {"calibration", "modules"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """One entry of the block: equal swaps in some layers.

    Attributes:
        classes, options, layers, strength: as `patch_model` takes them; layers count over the whole model.
        modules: the pattern that chose the layers, or None.
        fit: of the calibration, or None without one.
        merged: True if the calibration is in the weights.
    """

    classes: tuple[type[Variant], ...]
    options: Options
    layers: list[int]
    strength: float
    modules: str | None
    fit: str | None
    merged: bool


Plan = list[Planned]


def read_block(block: Any) -> tuple[int, Plan]:
    """The number of swappable modules and the swaps that a config's `attn_swap` describes.

    Raises:
        ValueError: anything in it is missing, unknown, of the wrong type or out of range, or it is newer than us.
    """
    if isinstance(block, dict) and _whole(block.get("version")) and block["version"] > VERSION:
        raise ValueError(
            f"attn_swap: this checkpoint has version {block['version']} and was made by a newer hf_attn_swap (this one "
            f"reads version {VERSION}); upgrade with pip install -U hf-attn-swap."
        )
    _keys(block, {"version", "modules", "swaps"}, "the block")
    if not _whole(block["version"]) or block["version"] != VERSION:
        raise _damaged(f"version must be {VERSION}, got {block['version']!r}")
    modules, swaps = block["modules"], block["swaps"]
    if not _whole(modules) or not 0 < modules <= LIMIT:
        raise _damaged(f"modules must be a positive whole number, got {modules!r}")
    if not isinstance(swaps, list) or not 0 < len(swaps) <= modules:
        raise _damaged(f"swaps must be a list of one to {modules} entries")
    plan, seen = [], set[int]()
    for entry in swaps:
        plan.append(_read_swap(entry, modules))
        if seen & set(plan[-1].layers):
            raise _damaged("a layer is swapped twice")
        seen |= set(plan[-1].layers)
    return modules, plan


def _read_swap(entry: Any, modules: int) -> Planned:
    given = set(entry) if isinstance(entry, dict) else set()
    _keys(entry, KEYS | (OPTIONAL_KEYS & given), "a swap")
    layers, options = entry["layers"], entry["options"]
    if not isinstance(layers, list) or not layers or not all(_whole(i) and 0 <= i < modules for i in layers):
        raise _damaged(f"layers must be whole numbers from 0 to {modules - 1}")
    if len(set(layers)) != len(layers):
        raise _damaged("a layer is swapped twice")
    try:
        classes = parse(entry["variant"])
        _keys(options, {cls.name for cls in classes}, "the options")
        for cls in classes:
            _keys(
                options[cls.name], {field.name for field in dataclasses.fields(cls.Options)}, f"options of {cls.name}"
            )
        chosen = parse_options(classes, options if len(classes) > 1 else options[classes[0].name])
        strength = check_strength(entry["strength"])
        fit, merged = _read_calibration(entry, strength)
    except ValueError as problem:
        raise problem if str(problem).startswith("attn_swap:") else _damaged(str(problem)) from None
    pattern = entry.get("modules")
    if "modules" in entry and (not isinstance(pattern, str) or not 0 < len(pattern) <= LONGEST):
        raise _damaged(f"modules must be a pattern of module paths, got {pattern!r}")
    return Planned(
        classes=classes,
        options=chosen,
        layers=layers,
        strength=strength,
        modules=pattern,
        fit=fit,
        merged=merged,
    )


def _read_calibration(entry: dict[str, Any], strength: float) -> tuple[str | None, bool]:
    """The fit, and whether it was merged into the weights."""
    if "calibration" not in entry:
        return None, False
    calibration = entry["calibration"]
    _keys(calibration, {"fit", "merged"}, "the calibration")
    check_fit(calibration["fit"])
    if not isinstance(calibration["merged"], bool):
        raise _damaged(f"merged must be true or false, got {calibration['merged']!r}")
    if calibration["merged"] and strength != 1:
        raise _damaged(f"a merged calibration is right at strength 1 alone, got {strength}")
    return calibration["fit"], calibration["merged"]


def _keys(thing: Any, wanted: set[str], where: str) -> None:
    if not isinstance(thing, dict) or set(thing) != wanted:
        found = sorted(map(str, thing)) if isinstance(thing, dict) else type(thing).__name__
        raise _damaged(f"{where} must have exactly {sorted(wanted)}, found {found}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _damaged(what: str) -> ValueError:
    shown = what if len(what) <= LONGEST else f"{what[:LONGEST]}..."
    return ValueError(f"attn_swap: the swap described in config.json cannot be used: {shown}.")


def _rebuild(model: PreTrainedModel, block: Any) -> None:
    """Attach the swaps that the config describes, without weights yet."""
    modules, plan = read_block(block)
    usable = [site for site in sites(model) if site.usable]
    if len(usable) != modules:
        return  # part of a larger model: the outermost one rebuilds, and until then our attention refuses to run
    if model.config._attn_implementation != seam.NAME:
        raise ValueError(
            f"this checkpoint was converted with hf_attn_swap and cannot run with "
            f"attn_implementation={model.config._attn_implementation!r}; leave that argument out."
        )
    swaps = {}
    for planned in plan:
        for index in planned.layers:
            swap = build_swap(usable[index], planned.classes, planned.options, index)
            swap.strength, swap.selection = planned.strength, planned.modules
            if planned.merged:
                swap.merged = planned.fit
            elif planned.fit is not None:
                swap.calibrate(planned.fit, next(usable[index].container.parameters()))
            swaps[index] = swap
    Installation.start(model, model, loaded=True).put(swaps)


def _check_loaded(model: nn.Module, info: dict[str, Any], where: str) -> None:
    """Every weight of the swap must have come from the checkpoint.

    Raises:
        ValueError: some are missing, left over, or of another shape, or the swap could not be rebuilt.
    """
    if getattr(getattr(model, "config", None), "attn_swap", None) is None:
        return
    if model.__dict__.get(ATTRIBUTE) is None:
        raise ValueError(
            f"{where}: the swap in config.json was made for another model than {type(model).__name__} (another number "
            "of attention modules); load the class that was saved."
        )
    for kind in ("missing", "unexpected", "mismatched"):
        keys = (key if isinstance(key, str) else key[0] for key in info.get(f"{kind}_keys") or ())
        if wrong := sorted(key for key in keys if ".attn_swap." in f".{key}"):
            raise ValueError(f"{where}: {kind} weights of the swapped attention: {', '.join(wrong)}.")
    for module in model.modules():
        if isinstance(module, Swap):
            module.fresh = False
            module.refill()


def _wrap_post_init() -> None:
    original = PreTrainedModel.post_init

    @functools.wraps(original)
    def post_init(self: PreTrainedModel) -> None:
        block = self.config.__dict__.get("attn_swap", ABSENT)
        if block is not ABSENT:  # inner models have rebuilt theirs; the layers are counted over the outermost
            for module in list(self.modules()):
                if isinstance(inner := module.__dict__.get(ATTRIBUTE), Record):
                    inner.loaded = False
                    assert isinstance(module, PreTrainedModel)
                    Installation(module, inner).remove()
        original(self)  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        if block is not ABSENT:
            _rebuild(self, block)

    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]  # the one documented exception


def _wrap_from_pretrained() -> None:
    original = PreTrainedModel.from_pretrained.__func__  # type: ignore[attr-defined]  # a classmethod has one

    @functools.wraps(original)
    def from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        wanted = kwargs.pop("output_loading_info", False)
        model, info = original(cls, *args, output_loading_info=True, **kwargs)
        _check_loaded(model, info, str(args[0] if args else kwargs.get("pretrained_model_name_or_path")))
        return (model, info) if wanted else model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[assignment, method-assign]  # as above


_wrap_post_init()
_wrap_from_pretrained()
