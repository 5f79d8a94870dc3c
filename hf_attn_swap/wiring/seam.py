"""Registers one attention function and one mask function with transformers; only this file uses these interfaces.

Both functions are registered under the same names. If a name had no mask function, transformers would drop masks
without an error. An engine with an attention function of its own gets a second attention function around it.
Axes: B batch, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from ..core.call import Call, ForwardContext, Geometry, Inputs, Three
from ..core.masks import Masks
from ..layer.compute import ORDINARY, ordinary, reference
from ..layer.swap import STOCK, Phase, Swap
from .implementations import NAME, Check, accept

# Given to the stock SDPA function for keys that are repeated already: a module that tells of no groups of heads.
_UNGROUPED = nn.Module()
# Names of the keyword arguments that carry a call's context; `attention_forward` has them as arguments.
CALL = "attn_swap_call"
CONTEXT = "attn_swap_carried"
LAYER = "attn_swap_layer"
# An attribute of a config, written when the layers are wired: which masks a pass must get. It is not saved.
MASKS = "attn_swap_masks"
EAGER = "eager"  # numbers to add, because the stock model runs without SDPA; also for the model's own code
WHOLE = "whole"  # always one of queries and keys, because the model changes its masks between two layers
DENSE = "dense"  # no masks of keys, because the modules look into their masks
OF_KEYS = "keys"  # masks of keys where possible, because a variant needs them


def swap_of(core: nn.Module) -> Swap | None:
    """The swap of an attention module; None for a module that `patch_model` left as it is.

    Raises:
        ValueError: the config names `hf_attn_swap`, but `patch_model` was never called on a model with this module.
    """
    swap: Any = core._modules.get("attn_swap")  # a Swap, or PEFT's wrapper of a Swap; faster than the attribute
    if swap is None and "attn_swap" not in core.__dict__:
        raise ValueError(
            f"{type(core).__name__}: the config asks for {NAME!r}, but this module was not patched. Build the model "
            "with from_pretrained or call patch_model on the whole model; if only part of a converted model was "
            "loaded, load all of it."
        )
    return swap  # type: ignore[no-any-return]


@dataclass(frozen=True)
class MaskWithContext:
    """A mask together with the context of a call, for modules that pass on their mask but no keyword arguments.

    Attributes:
        mask: the mask that the module was given.
        context: the keyword arguments that the attention function needs.
    """

    mask: Tensor | None
    context: dict[str, Any]


def kind_of_masks(config: Any) -> Any:
    """What `MASKS` says in a config, or None."""
    return getattr(config, "__dict__", {}).get(MASKS)  # a missing attribute of a config is slow to ask for


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskWithContext | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    output_attentions: bool | None = None,
    attn_swap_call: Call | None = None,
    attn_swap_carried: ForwardContext | None = None,
    attn_swap_layer: Any = None,
    attn_swap_stock: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention for `attn_implementation="hf_attn_swap"`.

    A module without a swap, and a module at strength 0, run the stock SDPA function.

    Args:
        module: the attention module that calls.
        query: (B,H,Q,D).
        key: (B,G,K,D).
        value: (B,G,K,D).
        attention_mask: the mask from `mask_for_swap`, perhaps with the context of the call; or None.
        scaling: the factor of q k^T; None means 1 / sqrt(D).
        dropout: the probability that a weight is dropped.
        is_causal: True for causal order if there is no mask; None means as `module.is_causal` says.
        output_attentions: True if the caller wants the weights.
        attn_swap_call: the call of the swapped module, if its hooks ran.
        attn_swap_carried: what the layers of the pass share, if it arrives here.
        attn_swap_layer: what only the hooks of the module read.
        attn_swap_stock: True if the module runs as if not swapped.
        kwargs: what else the architecture passes.

    Returns:
        The heads (B,Q,H,D); and the weights (B,H,Q,K), or None if they were not computed.

    Raises:
        ValueError: the module was not patched or was called around its hooks, its sizes differ from the sizes that
            were found when the model was patched, or the call has attention sinks, or a mask or bias that the variant
            cannot apply.
    """
    if isinstance(attention_mask, MaskWithContext):
        kwargs |= attention_mask.context
        given = (query, key, value, attention_mask.mask, scaling, dropout, is_causal, output_attentions)
        return attention_forward(module, *given, **kwargs)
    context, want_weights = attn_swap_carried, bool(output_attentions)
    if context is not None:
        context.arrived = True
        want_weights = want_weights or context.want_weights
    swap = swap_of(module)
    causal, queries = False, query.shape[2]
    if attention_mask is None and queries > 1:
        causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
        if kind_of_masks(getattr(module, "config", None)) == EAGER:  # then no mask means that every key may be seen
            causal = False
    if "s_aux" in kwargs or "sinks" in kwargs:
        _refuse_own_sinks(kwargs)
    if causal and key.shape[2] > queries:  # the first call with a static cache: the later places are still unused
        key, value = key[:, :, :queries], value[:, :, :queries]
    inputs = Inputs(
        query=query,
        key=key,
        value=value,
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        masks=_masks(query, key.shape[2], attention_mask, causal, context),
        dropout=dropout,
        softcap=kwargs.get("softcap"),
        position_bias=kwargs.get("position_bias"),
        own_window=kwargs.get("sliding_window"),
    )
    sdpa = functools.partial(_sdpa, module, inputs, kwargs)
    if swap is not None and swap.phase != Phase.OFF and not attn_swap_stock:
        heads, weights = swap(inputs, asked(module, swap, attn_swap_call, (query, key, value)), sdpa, want_weights)
        return heads.contiguous(), weights
    if want_weights or inputs.softcap is not None:
        heads, weights = reference(ORDINARY, inputs, Call(x=query, context=context))
        return heads.contiguous(), weights
    return ordinary(inputs, sdpa), None


def asked(module: nn.Module, swap: Swap, call: Call | None, qkv: Three) -> Call:
    """Note that the attention function was asked with the context of a call, and check this context.

    Args:
        module: the attention module.
        swap: its swap, which computes.
        call: the context that its hooks made, if they ran.
        qkv: query (B,H,Q,D), key (B,G,K,D) and value (B,G,K,D).

    Returns:
        The call, with the rows of the input (B,Q,E) where the swap reads them.

    Raises:
        ValueError: the hooks did not run, the sizes differ from those that were found when the model was patched, or
            the input does not have one row per query.
    """
    if call is None:
        raise ValueError(
            f"{type(module).__name__} is swapped, but its hooks did not run; call the module itself and not its "
            "method .forward()."
        )
    call.used += 1
    query, key, value = qkv
    sizes, (batch, heads, queries, _), (_, groups, _, width) = swap.geometry, query.shape, value.shape
    if (heads, width, key.shape[1], heads % groups) != (sizes.heads, sizes.head_dim, groups, 0):
        _refuse_sizes(module, sizes, query, key, value)
    if swap.reads_input and (call.x.dim() != 3 or call.x.shape[:2] != (batch, queries)):
        call.x = _rows_of_input(module, call.x, query)
    return call


def _masks(query: Tensor, keys: int, mask: Tensor | None, causal: bool, context: ForwardContext | None) -> Masks:
    """Give the mask of a call its meaning, for this number of keys.

    Raises:
        ValueError: the mask is neither bool nor of floating point.
    """
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"{NAME}: an attention mask with the dtype {mask.dtype} says neither what a query may see nor "
            "what to add to its scores; pass mask.bool(), True where a query may see a key, or a float mask to add."
        )
    queries, key_mask = query.shape[2], None
    if mask is not None and mask.dim() == 2:
        # `mask_for_swap` alone makes such a mask: the order is causal, and the queries are the last tokens.
        key_mask, mask, causal = mask, None, True
    elif queries > 1 and mask is not None and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
        # All heads and queries share one row.
        key_mask, mask, causal = mask[:, 0, 0].expand(query.shape[0], -1), None, False
    return Masks(
        queries=queries,
        keys=keys,
        device=query.device,
        key_mask=key_mask,
        given=mask,
        causal=causal and mask is None,
        made=context.masks if context is not None else [],
    )


def _refuse_own_sinks(kwargs: dict[str, Any]) -> None:
    """Refuse an architecture that gives sinks of its own to the attention function.

    Raises:
        ValueError: it does.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("sinks") is not None:
        raise ValueError(f"{NAME} cannot swap attention with attention sinks; use the stock attention for this model.")


def _sdpa(
    module: nn.Module,
    inputs: Inputs,
    kwargs: dict[str, Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """Run the stock SDPA function on query, key and value, and return the heads (B,Q,H,D).

    Keys and values are those of the groups (B,G,K,D), or they are repeated for each query head already (B,H,K,D). There
    may be fewer heads than the module has.
    """
    query, key, value = qkv
    if key is not inputs.key and query.shape[1] * inputs.key.shape[1] != key.shape[1] * inputs.query.shape[1]:
        module = _UNGROUPED
    heads: Tensor = sdpa_attention_forward(
        module, query, key, value, mask, dropout=inputs.dropout, scaling=inputs.scaling, is_causal=causal, **kwargs
    )[0]
    return heads


def _refuse_sizes(module: nn.Module, sizes: Geometry, query: Tensor, key: Tensor, value: Tensor) -> NoReturn:
    """Refuse a module whose heads are not as many or as wide as they were when the model was patched.

    The width of a head is the width of its values. Queries and keys may have another width (latent attention).

    Raises:
        ValueError: always.
    """
    split = query.shape[1] < sizes.heads and value.shape[3] == sizes.head_dim
    reason = (
        "if the model was split by tensor parallelism, each process computes a part of the heads, and a swap needs all "
        "of them: load it without tp_plan; otherwise this architecture cannot be swapped"
    )
    raise ValueError(
        f"{type(module).__name__} was patched as {sizes.heads} heads of {sizes.head_dim}, but computes "
        f"{query.shape[1]} of {value.shape[3]} (keys: {key.shape[1]} heads, values: {value.shape[1]}); "
        f"{reason if split else 'this architecture cannot be swapped'}."
    )


def _rows_of_input(module: nn.Module, x: Tensor, query: Tensor) -> Tensor:
    """The input (B,Q,E) of a module that gets a grid of patches: its rows, one after the other, are the sequence.

    Raises:
        ValueError: the input does not have one row per query.
    """
    rows = x.flatten(1, 2) if x.dim() == 4 else x
    if rows.dim() != 3 or rows.shape[:2] != (query.shape[0], query.shape[2]):
        raise ValueError(
            f"{type(module).__name__}: its input {tuple(rows.shape)} is not one row per query {tuple(query.shape)} "
            "(packed, windowed or pooled tokens); this architecture cannot be swapped."
        )
    return rows


def mask_for_swap(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """Make the mask of a forward pass, for `attn_implementation="hf_attn_swap"`. transformers calls this function.

    Linear attention and attention in a window must not build a tensor of Q x K entries. If the model has one of them
    (`OF_KEYS`), a mask of plain padding therefore stays a mask of keys: (B,1,1,K) if every query sees the same keys,
    and (B,K) if the order is causal and the queries are the last tokens. Other layers of such a model expand the mask
    of keys, and get exactly the stock mask.

    Returns:
        None if no mask is needed; a mask of keys, as above; SDPA's bool mask (B,1,Q,K); or a mask of numbers
        (B,1,Q,K) if the stock model runs without SDPA.
    """
    kind = kind_of_masks(kwargs.get("config"))
    if kind == WHOLE:
        kwargs["allow_is_causal_skip"] = False
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    last = isinstance(q_offset, int) and q_offset + q_length == kv_length and kv_offset == 0
    of_keys = kind == OF_KEYS and plain and last
    if of_keys and attention_mask is None and 1 < q_length < kv_length:  # several new tokens and a cache, no padding
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=kwargs.get("device"))
    if of_keys and attention_mask is not None and tuple(attention_mask.shape) == (batch_size, kv_length):
        bidirectional = mask_function is bidirectional_mask_function
        may_skip = kwargs.get("allow_is_bidirectional_skip" if bidirectional else "allow_is_causal_skip", bidirectional)
        square = bidirectional or q_length in (1, kv_length)
        if not (may_skip and square and not is_tracing(attention_mask) and bool(attention_mask.all())):
            key_mask = attention_mask.bool()
            return key_mask[:, None, None, :] if bidirectional else key_mask
    make = eager_mask if kind == EAGER else sdpa_mask
    mask: Tensor | None = make(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        **kwargs,
    )
    return mask


def add_engine(name: str, check: Check) -> None:
    """Let swapped layers run under the attention function of an engine, which computes heads with a cache of its own.

    The engine has registered its function with transformers already. Here, a function takes its place that calls it,
    and then lets the swap change the heads.

    Args:
        name: the name of the engine's function in transformers.
        check: as in `implementations.accept`: refuses swaps that act before the heads, unless the engine does it.

    Raises:
        KeyError: the engine has registered no such function.
    """
    AttentionInterface.register(name, functools.partial(_by_engine, AttentionInterface()[name]))
    accept(name, check)


def _by_engine(
    engine: Any,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute attention by an engine's function, and what the swap of a module does to heads.

    Returns:
        The heads, in the shape that the engine gives, which holds those of (B,Q,H,D); and None.

    Raises:
        ValueError: as in `attention_forward`.
    """
    call: Call | None = kwargs.pop(CALL, None)
    for name in (CONTEXT, LAYER, STOCK):
        kwargs.pop(name, None)
    heads: Tensor = engine(module, query, key, value, attention_mask, **kwargs)[0]
    swap = swap_of(module)
    if swap is None or swap.phase == Phase.OFF:
        return heads, None
    if "s_aux" in kwargs or "sinks" in kwargs:
        _refuse_own_sinks(kwargs)
    call = asked(module, swap, call, (query, key, value))
    swap.prepare(call, value)
    rows = heads.reshape(query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return swap.read(rows, call).reshape(heads.shape), None


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_for_swap)
