"""Makes every self-attention layer of a model visible to hooks: a stock layer gets a softmax swap for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..core.probe import Probe
from ..families import sites
from ..layer.registry import parse, parse_options
from ..layer.swap import Phase
from ..patch import build_swap, patch_model, swappable, unpatch_model
from ..wiring.install import installation_of, model_root

CONTROL = "softmax"


@contextlib.contextmanager
def instrumented(model: nn.Module) -> Iterator[Any]:
    """Inside the `with` block, every swappable layer computes through a `Swap`, and its output has the same bits.

    Afterwards the model is as before. A model that has probes of its own is visible as it is.

    Args:
        model: a `PreTrainedModel`, stock or swapped, or a wrapper that holds one.

    Yields:
        The transformers model.

    Raises:
        ValueError: `model` is not a transformers model, or nothing in the model can be swapped.
    """
    root = model_root(model)
    if any(isinstance(module, Probe) for module in root.modules()) and not sites(root):
        yield root
        return
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
    """Give a softmax swap to layers that run the stock function. The swap computes equal bits, and hooks see it."""
    installation = installation_of(root)
    assert installation is not None
    classes = parse(CONTROL)
    quiet = [layer for layer in swappable(installation) if not layer.swapped or layer.swap.phase == Phase.OFF]
    ordinary = {layer: build_swap(layer, classes, parse_options(classes, {})) for layer in quiet}
    with installation.temporarily(ordinary):
        yield
