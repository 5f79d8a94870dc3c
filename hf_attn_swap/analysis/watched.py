"""A model whose every self-attention layer can be watched: where it is stock, the same function through a swap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..core.registry import parse, parse_options
from ..core.swap import Phase
from ..patch import build_swap, patch_model, swappable, unpatch_model
from ..wiring.install import installation_of, model_root

CONTROL = "softmax"


@contextlib.contextmanager
def watched(model: nn.Module) -> Iterator[Any]:
    """Inside, every swappable layer computes through a `Swap`, with the same bits; afterwards all is as it was.

    Args:
        model: a `PreTrainedModel`, stock or swapped, or a wrapper that holds one.

    Yields:
        The transformers model.

    Raises:
        ValueError: no transformers model, or nothing in it could be swapped.
    """
    root = model_root(model)
    stock = installation_of(root) is None
    if stock:
        patch_model(root, CONTROL)
    try:
        with _ordinary_where_off(root):
            yield root
    finally:
        if stock:
            unpatch_model(root)


@contextlib.contextmanager
def _ordinary_where_off(root: Any) -> Iterator[None]:
    """Layers that run the stock function get a softmax swap, which computes the same bits and can be watched."""
    installation = installation_of(root)
    assert installation is not None
    classes = parse(CONTROL)
    usable, swapped = swappable(root), installation.swaps()
    quiet = [index for index in range(len(usable)) if index not in swapped or swapped[index][0].phase == Phase.OFF]
    ordinary = {index: build_swap(usable[index], classes, parse_options(classes, {}), index) for index in quiet}
    with installation.temporarily(ordinary):
        yield
