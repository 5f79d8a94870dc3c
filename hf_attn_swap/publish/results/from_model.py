"""What a converted model says about itself, in the form that results want."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from ...core.registry import get_variant
from .parts import AppliedSwap, Component


def applied_swaps(model: PreTrainedModel) -> tuple[int, tuple[AppliedSwap, ...]]:
    """`modules` and `swaps` of a `RunResult`, as the model's config has them.

    Raises:
        ValueError: the model's attention is not swapped.
    """
    block = getattr(model.config, "attn_swap", None)
    if block is None:
        raise ValueError(f"the attention of this {type(model).__name__} is not swapped; call patch_model first.")
    return read_swaps(block)


def read_swaps(block: dict[str, Any]) -> tuple[int, tuple[AppliedSwap, ...]]:
    """The same from a config's `attn_swap`, which must be a valid one; a saved config has lost the options' order."""
    swaps = []
    for entry in block["swaps"]:
        names = (name.strip() for name in entry["variant"].split("+"))
        components = tuple(_component(name, entry["options"][name]) for name in names)
        swaps.append(AppliedSwap(components=components, layers=tuple(entry["layers"]), strength=entry["strength"]))
    return block["modules"], tuple(swaps)


def _component(name: str, options: dict[str, Any]) -> Component:
    variant = get_variant(name)
    return Component(name=name, formula=variant.formula, paper=variant.paper, options=options)
