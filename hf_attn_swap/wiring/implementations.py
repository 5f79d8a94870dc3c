"""Knows the attention implementations of transformers under which a swapped layer computes.

The first one is that of this package, which computes every variant (`seam.py`). An engine that runs the modules of
transformers with an attention function of its own, such as vLLM, is added by `accept`, with a check that refuses what
the engine cannot compute. Under any other implementation a converted model does not run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..layer.swap import Swap

NAME = "hf_attn_swap"
Check = Callable[[str, Swap], None]

_CHECKS: dict[str | None, Check | None] = {NAME: None}
accepted = _CHECKS.__contains__  # True if swapped layers run under the implementation of this name


def accept(name: str, check: Check) -> None:
    """Let swapped layers run under an attention implementation that computes them by another function.

    Args:
        name: the name of the implementation in transformers.
        check: is given the path of each attention module and its swap before the swap is put in, and raises a
            ValueError for a swap that the implementation cannot compute.
    """
    _CHECKS[name] = check


def check(core: nn.Module, path: str, swap: Swap) -> None:
    """Check that the attention implementation of a model computes a swap.

    Args:
        core: the attention module, whose config names the implementation.
        path: its path in the model.
        swap: its swap.

    Raises:
        ValueError: it does not compute it.
    """
    config: Any = core.config
    if (engine := _CHECKS.get(config._attn_implementation)) is not None:
        engine(path, swap)
