"""A forward that goes around the attention function, as libraries of fast kernels put instead of the stock one."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_attn_swap.families import sites


def with_own_attention(core: nn.Module) -> Callable[..., Any]:
    """A forward that computes ordinary attention by itself."""
    width = next(module for module in core.modules() if isinstance(getattr(module, "weight", None), Tensor))

    def forward(self: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        heads = torch.softmax(hidden_states @ hidden_states.mT, -1) @ hidden_states
        assert width is not None
        return heads, None

    return forward


def go_around(model: nn.Module, layer: int = 0) -> str:
    """Give one attention module of a model such a forward; its path."""
    site = sites(model)[layer]
    site.core.forward = types.MethodType(with_own_attention(site.core), site.core)
    return site.path
