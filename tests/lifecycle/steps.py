"""What the life-cycle tests share: the heads of a family, copies of a model, and child processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers.models.auto import modeling_auto


def heads(config: Any) -> dict[str, type[nn.Module]]:
    """By auto class, every model class that transformers knows for a config."""
    classes_by_auto: dict[str, type[nn.Module]] = {}
    for name, auto in vars(modeling_auto).items():
        mapping = getattr(auto, "_model_mapping", None)
        if mapping is None or not name.startswith("AutoModel") or type(config) not in mapping:
            continue
        classes = mapping[type(config)]
        for cls in classes if isinstance(classes, (list, tuple)) else [classes]:
            if cls not in classes_by_auto.values():
                classes_by_auto[name] = cls
    return classes_by_auto


def auto_class(model: nn.Module) -> str:
    """The auto class that builds this model's class."""
    return next(name for name, cls in heads(model.config).items() if cls is type(model))  # type: ignore[arg-type]


def tensors(thing: Any) -> Iterator[Tensor]:
    """Every tensor of a model's output, in order; a cache is neither of these, so it is left out."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors(value)
    elif isinstance(thing, (list, tuple)):
        for value in thing:
            yield from tensors(value)


def same_bits(got: Tensor, wanted: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    return got.dtype == wanted.dtype and got.nan_to_num(7.0).equal(wanted.nan_to_num(7.0))
