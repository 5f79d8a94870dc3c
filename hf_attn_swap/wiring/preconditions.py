"""Checks what this package takes for granted in transformers, once, when the first model of a process is patched.

transformers has no promise for some names that every attention plugin needs, such as the attribute `is_causal` of an
attention module. A release may rename them. What can be tried is tried on tiny tensors; the rest is looked for. If
something is missing, patching stops here, with a sentence, and no model computes something else in silence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_layers import GradientCheckpointingLayer

from ..families.source import arguments
from .cache import LinearState
from .positions import MASK, POSITIONS, ROTARY, TOKENS

# transformers calls every mask function with the names that its own functions have.
MASK_ARGUMENTS = {
    *("batch_size", "q_length", "kv_length", "q_offset", "kv_offset"),
    *("mask_function", "attention_mask"),
}


@cache
def check() -> None:
    """Check everything.

    Raises:
        ValueError: something in the installed transformers is not as this package needs it.
    """
    with torch.device("cpu"):  # `from_pretrained` builds a model on the meta device, which has no numbers
        missing = [what for what, holds in PRECONDITIONS.items() if not holds()]
    if missing:
        raise ValueError(
            f"hf_attn_swap does not work with the installed transformers, which changed: {'; '.join(missing)}. Install "
            "a newer hf_attn_swap, or a transformers that this one was tested with (`hf-attn-swap doctor` names it)."
        )


def _module(**attributes: object) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def _heads(module: nn.Module, *, groups: int = 4, **given: Any) -> torch.Tensor:
    """What the stock function computes from fixed numbers: 3 tokens, 4 heads, and `groups` key/value heads."""
    query = torch.arange(48.0).view(1, 4, 3, 4).sin()
    key = query.cos()[:, :groups]
    return sdpa_attention_forward(module, query, key, key, None, **given)[0]


def _reads_order() -> bool:
    """An attention module says by its attribute whether its order is causal, and the call may say otherwise."""
    causal, free = _heads(_module(is_causal=True)), _heads(_module(is_causal=False))
    return not torch.equal(causal, free) and torch.equal(_heads(_module(is_causal=True), is_causal=False), free)


def _reads_groups() -> bool:
    """An attention module says by its attribute how many query heads share a key/value head."""
    try:
        grouped = _heads(_module(is_causal=False, num_key_value_groups=2), groups=2)
    except RuntimeError:
        return False
    return grouped.shape == (1, 3, 4, 4)


def _reads_scaling() -> bool:
    """The scale and the dropout are keyword arguments; without a scale all keys would weigh the same."""
    free = _module(is_causal=False)
    flat = _heads(free, scaling=0.0)
    with torch.random.fork_rng(devices=[]):
        dropped = _heads(free, scaling=0.0, dropout=0.9)
    return not torch.equal(flat, _heads(free)) and not torch.equal(flat, dropped)


def _names_positions() -> bool:
    """A decoder takes its mask, its tokens and their positions under the names by which `positions.py` finds them."""
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel  # few programs need another

    stack = {MASK, POSITIONS, *TOKENS}
    return stack <= set(arguments(LlamaModel)) and ROTARY in arguments(LlamaAttention)


def _has(holder: object, *names: str) -> Callable[[], bool]:
    return lambda: all(hasattr(holder, name) for name in names)


PRECONDITIONS: dict[str, Callable[[], bool]] = {
    "the attribute is_causal of attention modules": _reads_order,
    "the attribute num_key_value_groups of attention modules": _reads_groups,
    "the arguments scaling and dropout of attention functions": _reads_scaling,
    "the arguments of decoders for masks, tokens and positions": _names_positions,
    "the arguments of mask functions": lambda: set(inspect.signature(sdpa_mask).parameters) >= MASK_ARGUMENTS,
    "the config's names of the attention implementation and of output_attentions": _has(
        PreTrainedConfig(), "_attn_implementation", "output_attentions"
    ),
    "the attribute gradient_checkpointing of layers": _has(GradientCheckpointingLayer, "gradient_checkpointing"),
    "the methods of caches": _has(Cache, "update", "get_seq_length"),
    "the layers of caches": lambda: _has(DynamicLayer(), "is_initialized", "keys")() and LinearState() is not None,
}
