"""The only file that touches transformers' attention API: one attention function and one mask function.

Both are registered under one name; without the mask function, masks would be dropped silently.
Axes: B batch, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, eager_mask, sdpa_mask
from transformers.utils.import_utils import is_tracing

from ..core.call import Call, Carried, Inputs
from ..core.compute import Places, ordinary, reference
from ..core.masks import Masks
from ..core.swap import STOCK, Phase, Swap
from ..variants.base import VARIANTS

NAME = "hf_attn_swap"
LINEAR_NAME = (
    "hf_attn_swap_linear"  # the same, on the own config of a stack with linear attention inside a larger model
)
NAMES = (NAME, LINEAR_NAME)
CALL, CARRIED, LAYER = "attn_swap_call", "attn_swap_carried", "attn_swap_layer"
MASKS = "attn_swap_masks"  # of a config: "eager" where the stock model gives its modules float masks
CACHES = ("past_key_values", "layer_past")  # how architectures call the cache (GPT-NeoX keeps the old name)


def swap_of(core: nn.Module) -> Swap | None:
    """The swap of an attention module, None for one that was left alone.

    Raises:
        ValueError: the module was never seen by `patch_model`, though its config names our attention.
    """
    try:
        swap: Swap | None = core.attn_swap  # type: ignore[assignment]  # None, a Swap, or PEFT's wrapper of one
    except AttributeError:
        raise ValueError(
            f"{type(core).__name__}: the config asks for {NAME!r}, but this module was not patched. Build the model "
            "with from_pretrained or call patch_model on the whole model; if only part of a converted model was "
            "loaded, load all of it."
        ) from None
    return swap


@dataclass(frozen=True)
class MaskWithContext:
    """A mask, and the context of a call that travels with it where a module hands its mask on and nothing else."""

    mask: Tensor | None
    context: dict[str, Any]


def eager_masks(config: Any) -> bool:
    """True where the stock model runs without SDPA: its masks are numbers to add, also for code of its own."""
    return getattr(config, MASKS, None) == "eager"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskWithContext | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The function behind `attn_implementation="hf_attn_swap"`: heads (B,Q,H,D), and weights (B,H,Q,K) if asked for.

    A module without a swap, or at strength 0, runs the stock SDPA function.

    Raises:
        ValueError: a module that was not patched, attention sinks, a paged cache, or a mask no form can honour.
    """
    if isinstance(attention_mask, MaskWithContext):
        kwargs |= attention_mask.context
        attention_mask = attention_mask.mask
    call: Call | None = kwargs.pop(CALL, None)
    carried: Carried | None = kwargs.pop(CARRIED, None)
    kwargs.pop(LAYER, None)
    stock = bool(kwargs.pop(STOCK, False))
    want_weights = bool(kwargs.pop("output_attentions", False)) or (carried is not None and carried.want_weights)
    if carried is not None:
        carried.arrived = True
    swap = swap_of(module)
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    causal = causal and not eager_masks(getattr(module, "config", None))  # there, no mask means that all may be seen
    inputs = _inputs(query, key, value, attention_mask, scaling, dropout, causal, kwargs, carried)
    sdpa = functools.partial(_sdpa, module, inputs, kwargs)
    if swap is not None and swap.phase != Phase.OFF and not stock:
        if call is None:
            raise ValueError(
                f"{type(module).__name__} is swapped but was called around its hooks; call the module, not .forward()."
            )
        _check_sizes(module, swap, query, key, value)
        _check_tokens(module, swap, query, call)
        heads, weights = swap(inputs, call, sdpa, want_weights)
        return heads.contiguous(), weights
    if want_weights or inputs.softcap is not None:
        heads, weights = reference(Places(), inputs, Call(x=query, carried=carried))
        return heads.contiguous(), weights
    return ordinary(inputs, sdpa), None


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    causal: bool,
    kwargs: dict[str, Any],
    carried: Carried | None,
) -> Inputs:
    """Give every mask one meaning, and refuse what no variant can honour."""
    for name, what in (("s_aux", "attention sinks"), ("cache", "a paged cache (continuous batching)")):
        if kwargs.get(name) is not None:
            raise ValueError(f"{NAME} cannot swap attention with {what}; use the stock attention for this model.")
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is None:
        causal = causal and queries > 1
        if causal and keys > queries:  # prefill of an empty static cache: the slots behind are still unused
            key, value = key[:, :, :queries], value[:, :, :queries]
    key_mask, mask = None, attention_mask
    if attention_mask is not None and attention_mask.dim() == 2:  # only ours: causal, with the queries last
        key_mask, mask, causal = attention_mask, None, True
    elif queries > 1 and mask is not None and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
        key_mask, mask, causal = mask[:, 0, 0].expand(query.shape[0], -1), None, False
    masks = Masks(
        queries=query.shape[2],
        keys=key.shape[2],
        device=query.device,
        key_mask=key_mask,
        given=mask,
        causal=causal and mask is None,
        made=carried.masks if carried is not None else [],
    )
    return Inputs(
        query=query,
        key=key,
        value=value,
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        masks=masks,
        dropout=dropout,
        softcap=kwargs.get("softcap"),
        position_bias=kwargs.get("position_bias"),
    )


def _sdpa(
    module: nn.Module,
    inputs: Inputs,
    kwargs: dict[str, Any],
    qkv: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    causal: bool,
) -> Tensor:
    """The stock SDPA function, grouped heads and all: heads (B,Q,H,D)."""
    query, key, value = qkv
    heads: Tensor = sdpa_attention_forward(
        module, query, key, value, mask, dropout=inputs.dropout, scaling=inputs.scaling, is_causal=causal, **kwargs
    )[0]
    return heads


def _check_sizes(module: nn.Module, swap: Swap, query: Tensor, key: Tensor, value: Tensor) -> None:
    """A head is as wide as its values: queries and keys may have another width (latent attention)."""
    sizes = swap.geometry
    if query.shape[1] != sizes.heads or value.shape[3] != sizes.head_dim or sizes.heads % key.shape[1]:
        split = query.shape[1] < sizes.heads and value.shape[3] == sizes.head_dim
        reason = (
            "if the model was split by tensor parallelism, each process computes a part of the heads, and a swap needs "
            "all of them: load it without tp_plan; otherwise this architecture cannot be swapped"
        )
        raise ValueError(
            f"{type(module).__name__} was patched as {sizes.heads} heads of {sizes.head_dim}, but computes "
            f"{query.shape[1]} of {value.shape[3]} (keys: {key.shape[1]} heads); "
            f"{reason if split else 'this architecture cannot be swapped'}."
        )


def _check_tokens(module: nn.Module, swap: Swap, query: Tensor, call: Call) -> None:
    if all(swap.at(place) is None for place in ("scores", "read", "write")):
        return  # a row of weights is the same whatever the module's input looks like
    if call.x.dim() == 4:  # a grid of patches: height and width are one sequence, row by row
        call.x = call.x.flatten(1, 2)
    if call.x.dim() != 3 or call.x.shape[:2] != (query.shape[0], query.shape[2]):
        raise ValueError(
            f"{type(module).__name__}: its input {tuple(call.x.shape)} is not one row per query {tuple(query.shape)} "
            "(packed, windowed or pooled tokens); this architecture cannot be swapped."
        )


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
    """None, a key mask, SDPA's 4-D bool mask (B,1,Q,K), or a float one where the stock model runs without SDPA.

    Linear attention must not build Q x K. So, if the model has linear layers, a mask of plain padding stays a mask of
    keys: (B,1,1,K) if every query sees the same keys, (B,K) if the order is causal and the queries are the last ones.
    Layers of this model that are not linear expand the mask of keys to exactly the stock mask.
    """
    if eager_masks(kwargs.get("config")):
        added: Tensor = eager_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            **kwargs,
        )
        return added
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    last = isinstance(q_offset, int) and q_offset + q_length == kv_length and kv_offset == 0
    linear = plain and last and _has_linear(kwargs.get("config"))
    if linear and attention_mask is None and 1 < q_length < kv_length:  # a chunk onto a cache: all keys are real
        attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=kwargs.get("device"))
    if linear and attention_mask is not None and tuple(attention_mask.shape) == (batch_size, kv_length):
        bidirectional = mask_function is bidirectional_mask_function
        may_skip = kwargs.get("allow_is_bidirectional_skip" if bidirectional else "allow_is_causal_skip", bidirectional)
        square = bidirectional or q_length in (1, kv_length)
        if not (may_skip and square and not is_tracing(attention_mask) and bool(attention_mask.all())):
            key_mask = attention_mask.bool()
            return key_mask[:, None, None, :] if bidirectional else key_mask
    mask: Tensor | None = sdpa_mask(
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


def _has_linear(config: Any) -> bool:
    """True if linear attention is in the config's model: the whole model says so in its block, a part by its name."""
    if getattr(config, "_attn_implementation", None) == LINEAR_NAME:
        return True
    swaps = (getattr(config, "attn_swap", None) or {}).get("swaps", ())
    return any(VARIANTS[name].replaces for swap in swaps for name in swap["variant"].split("+"))


for _name in NAMES:
    AttentionInterface.register(_name, attention_forward)
    AttentionMaskInterface.register(_name, mask_for_swap)
