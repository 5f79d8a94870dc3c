"""What a converted model says about itself, in the form that results want."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..registry import get_variant
from .parts import AppliedSwap, Component


def applied_swaps(model: PreTrainedModel) -> tuple[int, tuple[AppliedSwap, ...]]:
    """`modules` and `swaps` of a `RunResult`, from the block in the model's config.

    Raises:
        ValueError: the model's attention is not swapped.
    """
    block = getattr(model.config, "attn_swap", None)
    if block is None:
        raise ValueError(f"the attention of this {type(model).__name__} is not swapped; call patch_model first.")
    swaps = []
    for entry in block["swaps"]:
        components = []
        for name, options in entry["options"].items():
            cls = get_variant(name)
            components.append(Component(name=name, formula=cls.formula, paper=cls.paper, options=options))
        swaps.append(
            AppliedSwap(components=tuple(components), layers=tuple(entry["layers"]), strength=entry["strength"])
        )
    return block["modules"], tuple(swaps)
