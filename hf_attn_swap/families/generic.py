"""Finds the attention of architectures that have no file of their own, by the source code of their modules.

A core is a module whose forward asks transformers' `AttentionInterface` for the attention function. Projections are
found by their usual names. If the sizes of a module cannot be found, the module is refused with the reason. Nothing is
guessed.
"""

from __future__ import annotations

import ast
import inspect
import math
from typing import Any

from torch import nn

from ..core.call import Geometry
from ..core.kind import Kind
from .base import Family, fits_block
from .source import (
    arguments,
    asks_again,
    given_other_states,
    interface_calls,
    learned_input,
    mixes_mask,
    names_implementation,
    number,
    other_states,
    passed_through,
    projected,
    scales,
    stock_class,
    unknown_keywords,
)

SINKS = ("s_aux", "sinks")  # the names of attention sinks, which are added to the denominator of the softmax
RELATIVE = ("has_relative_attention_bias", "rel_logits_proj")  # attributes of modules that always have a position bias
CONFIGURED = (*RELATIVE, "has_spatial_attention_bias")
CROSS = ("crossattention", "cross_attn", "encoder_attn", "encdecattention")
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
FUSED = ("query_key_value", "qkv", "Wqkv")
QUERIES = ("q_proj", "query", "q_lin", "q", *FUSED)
KEYS = ("k_proj", "key", "k_lin", "k", *FUSED)
VALUES = ("v_proj", "value", "v_lin", "v", *FUSED)
OUTPUTS = ("o_proj", "out_proj", "out_lin", "o", "dense", "Wo")
WIDTHS = ("v_head_dim", "head_dim", "attention_head_size", "head_size", "key_value_proj_dim")
PATCHES = ("image_size", "patch_size")  # the configs of models that read images have one of these
HIDDEN = ("hidden_size", "d_model", "dim", "n_embd", "embed_dim")


def is_cross(name: str, module: nn.Module, parent: nn.Module | None) -> bool:
    """True for attention from one sequence to another (cross-attention).

    The module's flag, its class name or its own name can say so. The call in the parent's forward can say so too, if
    it gives what the parent has computed, or if the parent holds several modules of this class.
    """
    place = name.rpartition(".")[2]
    if getattr(module, "is_cross_attention", False) is True or "cross" in type(module).__name__.lower():
        return True
    if place.lower() in CROSS:
        return True
    siblings = sum(type(child) is type(module) for child in parent.children()) if parent is not None else 0
    cls: Any = type(None) if parent is None else stock_class(parent)
    core: Any = stock_class(module)
    given = given_other_states(cls, place, core, other_states(core, _path(module, *KEYS)))
    return given is not None and (given[1] or (siblings > 1 and given[0]))


def kind(core: nn.Module) -> Kind:
    """What a core reads, by its own causal flag and by the config that it holds.

    In a model of images and text, each tower has a config of its own, so each tower has its own kind.
    """
    if getattr(core, "is_causal", False) is True:
        return Kind.DECODER
    image = any(hasattr(getattr(core, "config", None), name) for name in PATCHES)
    return Kind.IMAGE if image else Kind.ENCODER


def unrunnable(module: nn.Module, cls: Any) -> str | None:
    """Why this package's attention function cannot compute even the stock attention of this module, or None."""
    for name in SINKS:
        if _passes(module, cls, name):
            return f"its softmax has attention sinks ({name}), which no variant can honour"
    if names_implementation(cls):
        return "it chooses the keys of each query by other ways if its attention is not called sdpa or eager"
    return None


def biased(module: nn.Module, cls: Any) -> str | None:
    """What this module does to its scores, beside scaling and masking, as the predicate of a sentence; or None."""
    if _passes(module, cls, "softcap"):
        return "bounds its scores by a soft cap"
    config = getattr(module, "config", None)
    relative = any(hasattr(module, name) or getattr(config, name, False) is True for name in CONFIGURED)
    relative = relative or str(getattr(module, "position_embeddings_type", None)).startswith("relative")
    if relative and _passes(module, cls, "position_bias"):
        return "adds a position bias to its scores"
    if mixes_mask(cls):
        return "adds numbers of its own to its scores, by way of the mask"
    return None


def query_scale(module: nn.Module, cls: Any, family: Family) -> float | None:
    """The factor by which this module scales its queries (and keys) where the attention function gets a scaling of 1.

    None if it cannot be read. With another scaling, what a module multiplies its queries by is part of its queries, as
    its norms and its rotary embedding are.
    """
    given = {call.keywords.get("scaling", "None") for call in interface_calls(cls)}
    if any(number(ast.parse(text, mode="eval").body, module) != 1 for text in given):
        return 1.0
    factors = [number(factor, module) for factor in scales(cls, (family.query, family.key))]
    return None if None in factors else float(math.prod(factors))  # type: ignore[arg-type]  # none of them is None


def _passes(module: nn.Module, cls: Any, name: str) -> bool:
    """True if the forward passes this argument to the attention function, and not an attribute that is None."""
    for call in interface_calls(cls):
        given = call.keywords.get(name, "None")
        attribute = given.removeprefix("self.")
        absent = given == "None" or (attribute.isidentifier() and getattr(module, attribute, given) is None)
        if not absent:
            return True
    return False


def packed(module: nn.Module, cls: Any) -> str | None:
    """Why the input of this module does not have one row per query and per key, or None."""
    if any("cu_seq_lens_q" in call.keywords for call in interface_calls(cls)):
        return "its input is packed: several images or clips lie in one sequence, so it is not one row per query"
    if asks_again(cls):
        return "it computes several attentions from one input, and joins them by a rule of its own"
    before = passed_through(cls, _path(module, *KEYS)) - passed_through(cls, _path(module, *QUERIES))
    if pooled := [name for name in sorted(before) if isinstance(getattr(module, name, None), nn.Module)]:
        return f"its keys and values come from {pooled[0]}, so they are not those of its queries' tokens"
    return None


def by_mask(cls: Any) -> bool:
    """True if the forward of this class passes no keyword arguments on to the attention function.

    The context of a call must then travel with the mask.
    """
    calls = interface_calls(cls)
    return bool(calls) and not all(call.passes_on for call in calls)


def mask_argument(cls: Any) -> str | None:
    """The argument that the forward of this class passes on as the mask and uses for nothing else, or None."""
    masks = {call.mask for call in interface_calls(cls)}
    return masks.pop() if len(masks) == 1 else None


def unknown(cls: Any) -> str | None:
    """Why this package cannot tell what the module asks of the attention function, or None."""
    if names := unknown_keywords(cls):
        return f"it gives {', '.join(names)} to the attention function, which this hf_attn_swap does not know"
    return None


def refusal(module: nn.Module) -> str | None:
    """Why a core cannot be swapped, or None."""
    cls: Any = stock_class(module)
    parameters = inspect.signature(cls.forward).parameters
    if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return "its forward takes no keyword arguments to pass on to the attention function"
    key = _path(module, *KEYS)
    if (other := _not_its_tokens(cls, key)) is not None:
        return other
    if needed := [name for name in other_states(cls, key) if parameters[name].default is inspect.Parameter.empty]:
        return f"it attends to its own tokens and to another sequence ({needed[0]}) at once"
    learned = learned_input(cls, _path(module, *QUERIES) or "")
    if isinstance(getattr(module, learned or "", None), nn.Parameter):
        return f"its queries are parameters ({learned}), not the tokens of its input"
    if by_mask(cls) and mask_argument(cls) is None:
        return "its forward passes neither keyword arguments nor its mask on to the attention function"
    if not hasattr(module, "config"):
        return "it has no config to read the attention implementation from"
    try:
        sizes = geometry(module)
    except ValueError as problem:
        return str(problem)
    value = _width(module, *VALUES)
    if value is not None and _path(module, *VALUES) not in FUSED and value != sizes.kv_heads * sizes.head_dim:
        return f"its values are {value} wide, where {sizes.kv_heads} heads of {sizes.head_dim} are expected"
    fused = _path(module, *FUSED)
    outputs = getattr(getattr(module, fused, None), "out_features", None) if fused is not None else None
    wanted = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    if outputs is not None and outputs != wanted:
        return f"{fused} has {outputs} outputs, where {sizes.heads} heads of {sizes.head_dim} have {wanted}"
    return None


def _not_its_tokens(cls: Any, key: str | None) -> str | None:
    """Why the first argument of the forward is not known to be the tokens of self-attention, or None."""
    names, read = arguments(cls), projected(cls, key)
    if not names:
        return "its forward takes no arguments"
    if names[0] in read or (not read and names[0] == "hidden_states"):
        return None
    if read:
        return f"its keys are made from {read[0]}, and not from the first argument of its forward ({names[0]})"
    return f"its source does not show that its keys are made from the first argument of its forward ({names[0]})"


def geometry(core: nn.Module) -> Geometry:
    """The sizes of a core, read from the usual attributes of the module and of its config.

    Raises:
        ValueError: the number of heads or the width has none of these names.
    """
    config = core.config
    heads = _first(core, HEADS) or _first(config, ("num_attention_heads", "num_heads", "n_heads", "n_head"))
    read = _width(core, *QUERIES, side="in_features")
    hidden = read or _first(core, ("embed_dim",)) or _first(config, HIDDEN)
    if heads is None or hidden is None:
        raise ValueError("its number of heads or its width has none of the usual attribute names")
    head_dim = _first(core, WIDTHS) or hidden // heads
    groups = _first(core, ("num_key_value_groups",)) or 1
    key_dim = _first(core, ("qk_head_dim",))  # latent attention: queries and keys have another width than values
    return Geometry(heads=heads, kv_heads=heads // groups, head_dim=head_dim, hidden=hidden, key_dim=key_dim)


def _width(core: nn.Module, *names: str, side: str = "out_features") -> int | None:
    """The number of outputs (or inputs) of the first of these submodules that exists, or None if it tells none."""
    path = _path(core, *names)
    width = getattr(getattr(core, path, None), side, None) if path is not None else None
    return width if isinstance(width, int) else None


def resized(core: nn.Module) -> str | None:
    """Why the output of this module is no tensor like its input, or None."""
    inputs, outputs = _width(core, *QUERIES, side="in_features"), _width(core, *OUTPUTS)
    if inputs is not None and outputs is not None and inputs != outputs:
        return f"its input is {inputs} wide and its output {outputs}"
    return None


def _first(holder: object, names: tuple[str, ...]) -> int | None:
    """The first of these attributes that is a whole number, or None."""
    for name in names:
        value = getattr(holder, name, None)
        if isinstance(value, int):
            return value
    return None


def family(name: str, core: nn.Module, parent: nn.Module | None) -> Family:
    """A family for this module. A projection without any of the usual names is None."""
    bert = parent is not None and fits_block("bert", core, parent)
    return Family(
        name=name,
        core=type(core).__name__,
        query=_path(core, *QUERIES),
        key=_path(core, *KEYS),
        value=_path(core, *VALUES),
        output="output.dense" if bert else _path(core, *OUTPUTS),
        dropout="output.dropout" if bert else None,
        block="bert" if bert else "core",
        geometry=geometry,
    )


def _path(core: nn.Module, *names: str) -> str | None:
    """The first of these names that is a submodule of the core, or None."""
    return next((name for name in names if isinstance(getattr(core, name, None), nn.Module)), None)
