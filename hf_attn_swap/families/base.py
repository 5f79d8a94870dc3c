"""What a family is: where Q, K, V, W_o and the input of an attention module sit. Data, no patching loop.

Axes: H head, G key/value head, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from ..core.call import Geometry


@dataclass(frozen=True, kw_only=True)
class Family:
    """One architecture's attention module, the "core" that calls the attention interface.

    Attributes:
        name: model type, as in `config.model_type`.
        core: class name of the module that calls the attention interface.
        query, key, value: paths of the projections from the core; equal paths are one fused projection.
        output, dropout: paths of W_o and of the hidden dropout behind it, if there is one inside, from the container.
        block: which module is the container, the one that applies W_o: "core" if the core does and returns its
            output; "bert" if its parent does, with dropout and LayerNorm; "albert" if the core does all three.
        shared: True if one module is called for several layers.
        geometry: sizes of a core.
    """

    name: str
    core: str
    query: str | None
    key: str | None
    value: str | None
    output: str | None
    geometry: Callable[[nn.Module], Geometry]
    dropout: str | None = None
    block: str = "core"
    shared: bool = False

    @property
    def post_norm(self) -> bool:
        """True if LayerNorm follows the residual sum inside the container."""
        return self.block in ("bert", "albert")


def attributes(
    *, heads: str, head_dim: str, hidden: str = "config.hidden_size", kv_heads: str | None = None
) -> Callable[[nn.Module], Geometry]:
    """A geometry that reads dotted attribute paths of the core."""

    def read(core: nn.Module) -> Geometry:
        values = [_attribute(core, path) for path in (heads, kv_heads or heads, head_dim, hidden)]
        return Geometry(heads=values[0], kv_heads=values[1], head_dim=values[2], hidden=values[3])

    return read


def _attribute(core: nn.Module, path: str) -> int:
    value: object = core
    for part in path.split("."):
        value = getattr(value, part)
    assert isinstance(value, int), f"{type(core).__name__}.{path} is {value!r}"
    return value
