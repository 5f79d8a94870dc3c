"""Finds the attention of architectures that have no file of their own, by the source code of their modules.

A core is a module whose forward calls `get_interface(` to get the attention function. Projections are found by their
usual names. A module whose sizes cannot be found is refused with the reason, and nothing is guessed.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

from torch import nn

from ..core.call import Geometry
from .base import Family

CROSS = ("crossattention", "cross_attn", "encoder_attn", "encdecattention")
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
WIDTHS = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
HIDDEN = ("hidden_size", "d_model", "dim", "n_embd", "embed_dim")


@cache
def is_core(cls: Any) -> bool:
    """True if the forward of this class calls `get_interface(` itself."""
    try:
        return "get_interface(" in inspect.getsource(cls.forward)
    except (OSError, TypeError):  # the class has no Python source: it is built in, or compiled
        return False


def is_cross(name: str, module: nn.Module) -> bool:
    """True for attention from one sequence to another, as the module's flag, class name or path says."""
    flagged = getattr(module, "is_cross_attention", False) is True
    return flagged or "cross" in type(module).__name__.lower() or name.rpartition(".")[2].lower() in CROSS


def refusal(module: nn.Module) -> str | None:
    """Why a core cannot be swapped, or None."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())
    if len(parameters) < 2 or parameters[1].name != "hidden_states":
        return "its forward does not take hidden_states first"
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return "its forward takes no keyword arguments to pass on to the attention function"
    if not hasattr(module, "config"):
        return "it has no config to read the attention implementation from"
    try:
        geometry(module)
    except ValueError as problem:
        return str(problem)
    return None


def geometry(core: nn.Module) -> Geometry:
    """The sizes of a core, from the usual attribute names of the module and its config.

    Raises:
        ValueError: the number of heads or the width has none of these names.
    """
    config = core.config
    heads = _first(core, HEADS) or _first(config, ("num_attention_heads", "num_heads", "n_heads", "n_head"))
    hidden = _first(core, ("embed_dim",)) or _first(config, HIDDEN)
    if heads is None or hidden is None:
        raise ValueError("its number of heads or its width has none of the usual attribute names")
    head_dim = _first(core, WIDTHS) or hidden // heads
    groups = _first(core, ("num_key_value_groups",)) or 1
    return Geometry(heads=heads, kv_heads=heads // groups, head_dim=head_dim, hidden=hidden)


def _first(holder: object, names: tuple[str, ...]) -> int | None:
    found = (getattr(holder, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), None)


def family(name: str, core: nn.Module, parent: nn.Module | None) -> Family:
    """A family for this module; projections that have none of the usual names are None."""
    bert = getattr(parent, "self", None) is core and all(
        hasattr(getattr(parent, "output", None), part) for part in ("dense", "dropout", "LayerNorm")
    )
    return Family(
        name=name,
        core=type(core).__name__,
        query=_path(core, "q_proj", "query", "q_lin", "q", "query_key_value", "qkv"),
        key=_path(core, "k_proj", "key", "k_lin", "k", "query_key_value", "qkv"),
        value=_path(core, "v_proj", "value", "v_lin", "v", "query_key_value", "qkv"),
        output="output.dense" if bert else _path(core, "o_proj", "out_proj", "out_lin", "o", "dense"),
        dropout="output.dropout" if bert else None,
        block="bert" if bert else "core",
        geometry=geometry,
    )


def _path(core: nn.Module, *names: str) -> str | None:
    return next((name for name in names if isinstance(getattr(core, name, None), nn.Module)), None)
