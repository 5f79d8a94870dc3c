"""Which modules of a model are quantised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from ..core.swap import Swap


def quantizable(root: Any) -> Iterator[tuple[str, nn.Module]]:
    """Projections, norms and embeddings of the model without its task head, and a variant's own projections."""
    base = root.base_model
    variants = [variant for module in base.modules() if isinstance(module, Swap) for variant in module.variants]
    own = {id(getattr(variant, name)) for variant in variants for name in variant.projections}
    inside = {id(module) for module in base.modules()}
    for path, module in root.named_modules():
        kind = is_matmul(module) or is_norm(module) or isinstance(module, nn.Embedding)
        if id(module) in inside and kind and (".attn_swap." not in path or id(module) in own):
            yield path, module


def is_matmul(module: nn.Module) -> bool:
    """True for a projection: Linear, Conv2d (patches), GPT-2's Conv1D."""
    return isinstance(module, nn.Linear | nn.Conv2d) or type(module).__name__ == "Conv1D"


def is_norm(module: nn.Module) -> bool:
    """True for LayerNorm, RMSNorm and the like."""
    return type(module).__name__.endswith("Norm")
