"""Defines the type of a family, which says where an attention module keeps Q, K, V, W_o and its input.

A family is data: it contains no code that patches a model.

Axes: H head, G key/value head, D head width, E model width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..core.call import Geometry


@dataclass(frozen=True, kw_only=True)
class Family:
    """The places inside one architecture's attention.

    The "core" is the module that calls the attention interface. The "container" is the module that applies W_o.

    Attributes:
        name: the model type, as in `config.model_type`.
        core: the class name of the module that calls the attention interface.
        query, key, value: the paths from the core to the projections. Equal paths mean one fused projection. None
            means that the path is not known.
        output: the path from the container to W_o; None if the path is not known.
        dropout: the path from the container to the hidden dropout after W_o; None if the container has none.
        block: "core" if the core applies W_o and returns the result; "bert" if the core's parent applies W_o, dropout
            and LayerNorm; "albert" if the core applies all three.
        shared: True if the model calls one module for several layers.
        geometry: a function that reads the sizes of a core.
        tiny: the arguments of a small config without dropout: `AutoConfig.for_model(name, **tiny)` makes it. `doctor`
            and the tests run every variant on such a model. Empty for an architecture that has no file here.
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
    tiny: Mapping[str, Any] = field(default_factory=dict)

    @property
    def post_norm(self) -> bool:
        """True if LayerNorm follows the residual sum inside the container."""
        return self.block in ("bert", "albert")


def attributes(
    *, heads: str, head_dim: str, hidden: str = "config.hidden_size", kv_heads: str | None = None
) -> Callable[[nn.Module], Geometry]:
    """Make a function that reads the sizes of a core from attributes.

    Args:
        heads: the dotted path from the core to the number of query heads.
        head_dim: the path to the width of a head.
        hidden: the path to the width of the module's input and output.
        kv_heads: the path to the number of key/value heads; None means as many as query heads.
    """

    def read(core: nn.Module) -> Geometry:
        values = [_attribute(core, path) for path in (heads, kv_heads or heads, head_dim, hidden)]
        return Geometry(heads=values[0], kv_heads=values[1], head_dim=values[2], hidden=values[3])

    return read


def _attribute(core: nn.Module, path: str) -> int:
    """The whole number at a dotted path from the core."""
    value: object = core
    for part in path.split("."):
        value = getattr(value, part)
    assert isinstance(value, int), f"{type(core).__name__}.{path} is {value!r}"
    return value
