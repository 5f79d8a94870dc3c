"""Reads the swaps of a converted model, in the form of a `RunResult`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ...layer.registry import canonical_keys, parse
from ...variants.base import Variant
from .parts import AppliedSwap, Component


def applied_swaps(model: PreTrainedModel) -> tuple[int, tuple[AppliedSwap, ...]]:
    """The fields `modules` and `swaps` of a `RunResult`, read from the model's config.

    Raises:
        ValueError: the model's attention is not swapped.
    """
    block = getattr(model.config, "attn_swap", None)
    if block is None:
        raise ValueError(f"the attention of this {type(model).__name__} is not swapped; call patch_model first.")
    return read_swaps(block)


def read_swaps(block: dict[str, Any]) -> tuple[int, tuple[AppliedSwap, ...]]:
    """The fields `modules` and `swaps` of a `RunResult`, read from a valid `attn_swap` block of a config.

    Options come in the order of the block; a saved config sorts them.
    """
    layers: dict[str, list[int]] = {}  # entries may differ in what a conversion noted, such as the order of heads
    swaps: dict[str, AppliedSwap] = {}
    for entry in block["swaps"]:
        options = canonical_keys(entry["options"])
        components = tuple(_component(cls, options[cls.name]) for cls in parse(entry["variant"]))
        same = repr((components, entry["strength"]))
        layers.setdefault(same, []).extend(entry["layers"])
        swaps[same] = AppliedSwap(components=components, layers=tuple(sorted(layers[same])), strength=entry["strength"])
    return block["modules"], tuple(swaps.values())


def _component(variant: type[Variant], options: dict[str, Any]) -> Component:
    return Component(name=variant.name, formula=variant.about.formula, paper=variant.about.paper, options=options)
