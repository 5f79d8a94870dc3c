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
from .source import called, is_core, stock_class

ALBERT = frozenset(("query", "key", "value", "dense", "output_dropout", "LayerNorm"))
UPGRADE = "install a newer hf_attn_swap, or a transformers that this one was tested with (`hf-attn-swap doctor`)"


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
    tiny: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def missing(self, core: nn.Module, container: nn.Module) -> str | None:
        """Why this family does not describe a module of that class name (after a change of transformers), or None."""
        if not is_core(stock_class(core)):
            return (
                "its forward does not ask transformers for the attention function (another program has replaced it: "
                "load the model without that program)"
            )
        paths = [(core, path) for path in (self.query, self.key, self.value)]
        paths += [(container, path) for path in (self.output, self.dropout)]
        for module, path in paths:
            if path is not None and not _has(module, path):
                return f"it has no {path}, which hf_attn_swap knows in this architecture; {UPGRADE}"
        if not fits_block(self.block, core, container):
            return f"its forward is not the one that hf_attn_swap knows in this architecture; {UPGRADE}"
        try:
            sizes = self.geometry(core)
        except (AttributeError, AssertionError) as problem:
            return f"its sizes are not where hf_attn_swap knows them ({problem}); {UPGRADE}"
        if not hasattr(core, "config"):
            return f"it has no config to read the attention implementation from; {UPGRADE}"
        if not hasattr(core, "is_causal"):
            return f"it does not say whether its order is causal (is_causal); {UPGRADE}"
        if sizes.heads != sizes.kv_heads and not hasattr(core, "num_key_value_groups"):
            return f"it does not say how many heads share keys and values (num_key_value_groups); {UPGRADE}"
        return None

    @property
    def post_norm(self) -> bool:
        """True if LayerNorm follows the residual sum inside the container."""
        return self.block in ("bert", "albert")


def fits_block(block: str, core: nn.Module, container: nn.Module) -> bool:
    """True if a container computes what its block says, by the submodules that its source calls.

    A block "bert" is LayerNorm(x + dropout(dense(heads))) in the container's submodule `output`, and the core is its
    submodule `self`. A block "albert" computes all of this in the core.
    """
    if block == "bert":
        output = getattr(container, "output", None)
        return getattr(container, "self", None) is core and called(type(output)) == {"dense", "dropout", "LayerNorm"}
    if block == "albert":
        cls = stock_class(core)
        numbers = ("attention_head_size", "scaling", "attention_dropout")
        return called(cls) == ALBERT and all(hasattr(core, name) for name in numbers)
    return True


def _has(module: nn.Module, path: str) -> bool:
    """True if a module has a submodule at this dotted path."""
    inside: object = module
    for part in path.split("."):
        inside = getattr(inside, part, None)
    return isinstance(inside, nn.Module)


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
