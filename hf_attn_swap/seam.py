"""The only file that touches transformers' attention API: one attention function, one mask function, six hooks.

The hooks put a per-call context into the keyword arguments on the way in, and do what comes after W_o on the way
out. They use their `module` argument and keep nothing between calls, so copies, pickles and threads are safe.
Axes: B batch, H head, G key/value head, Q query, K key, D head width, E model width.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask

from .compute import Inputs, Places, reference
from .swap import Swap
from .variants.base import VARIANTS, Call, Carried

NAME = "hf_attn_swap"
CALL, CARRIED, LAYER = "attn_swap_call", "attn_swap_carried", "attn_swap_layer"


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


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
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
    call: Call | None = kwargs.pop(CALL, None)
    carried: Carried | None = kwargs.pop(CARRIED, None)
    kwargs.pop(LAYER, None)
    want_weights = bool(kwargs.pop("output_attentions", False)) or (carried is not None and carried.want_weights)
    swap = swap_of(module)
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", True))
    inputs = _inputs(query, key, value, attention_mask, scaling, dropout, causal, kwargs)
    sdpa = functools.partial(_sdpa, module, inputs, kwargs)
    if swap is not None and swap.phase != "off":
        if call is None:
            raise ValueError(
                f"{type(module).__name__} is swapped but was called around its hooks; call the module, not .forward()."
            )
        _check_sizes(module, swap, query, key)
        heads, weights = swap(inputs, call, sdpa, want_weights)
        return heads.contiguous(), weights
    if want_weights or inputs.softcap is not None:
        heads, weights = reference(Places(), inputs, Call(x=query, carried=carried))
        return heads.contiguous(), weights
    mask, plain_causal = inputs.dense_mask(Call(x=query, carried=carried))
    return sdpa((inputs.query, inputs.key, inputs.value), mask, plain_causal), None


def _inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    causal: bool,
    kwargs: dict[str, Any],
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
    key_mask = attention_mask if attention_mask is not None and attention_mask.dim() == 2 else None
    mask = attention_mask if key_mask is None else None
    return Inputs(
        query=query,
        key=key,
        value=value,
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        key_mask=key_mask,
        mask=mask,
        causal=causal and mask is None,
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
    """transformers' own SDPA function, grouped heads and all: heads (B,Q,H,D)."""
    query, key, value = qkv
    heads: Tensor = sdpa_attention_forward(
        module, query, key, value, mask, dropout=inputs.dropout, scaling=inputs.scaling, is_causal=causal, **kwargs
    )[0]
    return heads


def _check_sizes(module: nn.Module, swap: Swap, query: Tensor, key: Tensor) -> None:
    sizes = swap.geometry
    if query.shape[1] != sizes.heads or query.shape[3] != sizes.head_dim or sizes.heads % key.shape[1]:
        raise ValueError(
            f"{type(module).__name__} was patched as {sizes.heads} heads of {sizes.head_dim}, but computes "
            f"{query.shape[1]} of {query.shape[3]} (keys: {key.shape[1]} heads); this architecture cannot be swapped."
        )


def mask_for_swap(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """None, a 2-D key mask (B,K), or SDPA's 4-D bool mask (B,1,Q,K).

    A linear variant must not build Q x K, so plain padding stays 2-D where the config has one; softmax layers get
    exactly the stock mask. A 2-D mask means: plain, or causal with the queries last.
    """
    plain = mask_function in (causal_mask_function, bidirectional_mask_function)
    last = isinstance(q_offset, int) and q_offset + q_length == kv_length and kv_offset == 0
    whole = attention_mask is not None and tuple(attention_mask.shape) == (batch_size, kv_length)
    if plain and last and whole and _has_linear(kwargs.get("config")):
        assert attention_mask is not None
        bidirectional = mask_function is bidirectional_mask_function
        may_skip = kwargs.get("allow_is_bidirectional_skip" if bidirectional else "allow_is_causal_skip", bidirectional)
        square = bidirectional or q_length in (1, kv_length)
        if not (may_skip and square and not torch.compiler.is_compiling() and bool(attention_mask.all())):
            return attention_mask.bool()
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
    swaps = (getattr(config, NAME_IN_CONFIG, None) or {}).get("swaps", ())
    return any(VARIANTS[name].replaces for swap in swaps for name in swap["variant"].split("+"))


NAME_IN_CONFIG = "attn_swap"
AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_for_swap)


def before_stack(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """On the model that owns the layers: what they share during this pass."""
    want = kwargs.get("output_attentions")
    want = getattr(module.config, "output_attentions", False) if want is None else want
    return args, {**kwargs, CARRIED: Carried(want_weights=bool(want))}


def after_stack(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
    """The pass is over: a shared module called again now is a re-computation, whose order nobody knows."""
    kwargs[CARRIED].closed = True


def before_layer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """On the block around a layer that carries scores: its residual stream, and whether it is checkpointed."""
    checkpointed = bool(getattr(module, "gradient_checkpointing", False)) and module.training
    if checkpointed and torch.is_grad_enabled():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(function, "keywords", {}).get("use_reentrant", True):
            raise ValueError(
                "mha under re-entrant activation checkpointing would lose gradients; call "
                "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})."
            )
    residual = args[0] if args else kwargs.get("hidden_states")
    return args, {**kwargs, LAYER: (residual, checkpointed)}


def before_core(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """On an attention module that applies its own W_o."""
    return _start(module, module, args, kwargs)


def before_bert(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """On the container of a BERT-like attention module."""
    return _start(module.self, module, args, kwargs)  # type: ignore[arg-type]  # a submodule by that name


def after_core(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """What comes after W_o, where the module returns W_o's output first."""
    call: Call | None = kwargs.get(CALL)
    swap = swap_of(module)
    if call is None or swap is None:
        return output
    return (swap.write(output[0], call), *output[1:])


def finish(core: nn.Module, out: Tensor, kwargs: dict[str, Any], dropout: nn.Module) -> Tensor:
    """What comes after W_o and dropout, inside a container that goes on to LayerNorm."""
    call: Call | None = kwargs.get(CALL)
    swap = swap_of(core)
    if call is None or swap is None:
        return out
    call.dropout = dropout
    return swap.write(out, call)


def _start(core: nn.Module, container: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Check the call and put its context into the keyword arguments."""
    swap = swap_of(core)
    if core.config._attn_implementation != NAME:  # type: ignore[union-attr]  # checked when patching
        raise ValueError(
            f"{type(core).__name__} is swapped, but the model's attention implementation is now "
            f"{core.config._attn_implementation!r}; keep {NAME!r}, or call unpatch_model first."  # type: ignore[union-attr]  # as above
        )
    if swap is None or swap.phase == "off":
        return args, kwargs
    for name in ("encoder_hidden_states", "key_value_states"):
        if kwargs.get(name) is not None:
            raise ValueError(f"{type(core).__name__}: cross-attention has no values of its own tokens to swap with.")
    x = args[0] if args else kwargs["hidden_states"]
    carried: Carried | None = kwargs.get(CARRIED)
    residual, checkpointed = kwargs.get(LAYER, (None, False))
    call = Call(
        x=x,
        start=_cache_length(core, swap, args, kwargs),
        carried=carried,
        order=_order(swap, carried),
        residual=residual,
        recomputed=checkpointed,
        dropout=container.get_submodule(swap.dropout_path) if swap.dropout_path else None,
    )
    _warn_frozen(core, swap)
    return args, {**kwargs, CALL: call}


def _cache_length(core: nn.Module, swap: Swap, args: Any, kwargs: dict[str, Any]) -> int | Tensor:
    """How many tokens the cache holds before this call: read and copied before the update moves it."""
    place = swap.cache_position
    cache = args[place] if place is not None and len(args) > place else kwargs.get("past_key_values")
    if cache is None:
        return 0
    length: int | Tensor = cache.get_seq_length(core.layer_idx)
    return length.clone() if isinstance(length, Tensor) else length


def _order(swap: Swap, carried: Carried | None) -> int:
    """The layer's place among those that carry scores; a shared module counts its calls."""
    if swap.order is not None or carried is None:
        return swap.order or 0
    if carried.closed and swap.carries:
        raise ValueError(
            "a module that serves several layers was computed again after the pass (activation checkpointing): its "
            "place is not known any more; train this model without checkpointing, or with another variant than mha."
        )
    carried.calls += 1
    return carried.calls - 1


def _warn_frozen(core: nn.Module, swap: Swap) -> None:
    if not (core.training and swap.fresh and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return
    parameters = list(swap.parameters())
    if parameters and not any(parameter.requires_grad for parameter in parameters):
        warnings.warn(
            f"the new parameters of {'+'.join(swap.names)} are frozen, so they stay at their neutral start; with PEFT, "
            "pass modules_to_save=['attn_swap'].",
            stacklevel=2,
        )
