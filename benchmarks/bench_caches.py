"""Takes a cache out of a model's output, and hands it to a model: found by its type, for benchmarks and tests.

transformers called the argument and the output `past_key_values`, and calls them `cache` since 5.24.
"""

from __future__ import annotations

import inspect
from typing import Any, get_args

from torch import nn
from transformers import Cache
from transformers.utils.generic import ModelOutput


def cache_of(output: ModelOutput) -> Cache:
    """The cache in a model's output.

    Raises:
        ValueError: the output has no cache.
    """
    results = [value for value in output.values() if isinstance(value, Cache)]
    if not results:
        raise ValueError(
            f"{type(output).__name__} has no cache, only {', '.join(output)}; call the model with use_cache=True, and "
            "in eval mode if it checkpoints its activations."
        )
    return results[0]


def with_cache(model: nn.Module, cache: Cache | None) -> dict[str, Cache | None]:
    """The keyword argument that hands a cache to a model's forward or to its `generate`.

    Raises:
        ValueError: no argument of the model's forward is a cache by its type.
    """
    parameters = inspect.signature(type(model).forward, eval_str=True).parameters
    names = [name for name, parameter in parameters.items() if _takes_a_cache(parameter.annotation)]
    if not names:
        raise ValueError(
            f"{type(model).__name__}.forward has no argument that is a transformers.Cache by its type, so it reads no "
            "cache; give the whole text in one call."
        )
    return {names[0]: cache}


def _takes_a_cache(annotation: Any) -> bool:
    """True if a type, or one of the types in a union, is a transformers Cache."""
    kinds = get_args(annotation) or (annotation,)
    return any(isinstance(kind, type) and issubclass(kind, Cache) for kind in kinds)
