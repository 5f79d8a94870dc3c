"""Lets a config describe exactly the swaps that run in the module that is being saved.

The outermost patched model has the block `attn_swap` in its config. What is saved may be another module: a part of that
model, another model around a shared part, or the same model after layers were removed or appended. Here the block is
made from the swaps that are inside the saved module, with the layers numbered within it. Where the block may not lead
back to the same model, the model is built from its config, without weights, and compared before anything is written.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel, initialization

from .families import obstacle, sites, stock_class
from .layer.swap import Swap
from .saved import shim
from .wiring import implementations, seam
from .wiring.install import ATTRIBUTE, Installation, Record

ABSENT = object()
KEYS = ("attn_swap", "attn_implementation", seam.MASKS)  # the last one is never written into a file


@contextlib.contextmanager
def described(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the config of a model has the block that loads to what runs in this model; or no block without a swap.

    Raises:
        ValueError: no block can describe the swaps inside, or the config does not build this model.
    """
    record = model.__dict__.get(ATTRIBUTE)
    if isinstance(record, Record):
        installation = Installation(model, record)
        installation.settle()
        if (now := installation.shape()) != record.shape:
            _check_config(installation)
            record.shape = now
        with _written(model.config, model.config.attn_swap):
            yield
    elif any(isinstance(module, Swap) for module in model.modules()):
        installation = Installation(model, Record())
        _check_inside(installation)
        with _written(model.config, installation.block()):
            _check_config(installation)
            yield
    elif "attn_swap" in model.config.__dict__ and _in_patched_model(model):
        with _written(model.config, None):
            yield
    else:
        yield


def _in_patched_model(model: PreTrainedModel) -> bool:
    """True if a model without swaps is a part of a patched model: each module that could have a swap says so."""
    return all(hasattr(site.core, "attn_swap") for site in sites(model) if site.usable)


@contextlib.contextmanager
def _written(config: PreTrainedConfig, block: dict[str, Any] | None) -> Iterator[None]:
    """Inside, a config has this block, or none, and the configs of the model's parts have none."""
    wanted = {} if block is None else {"attn_swap": block, "attn_implementation": implementations.NAME}
    changes = [
        (part, key, wanted.get(key, ABSENT) if part is config else ABSENT)
        for part in shim.parts(config)
        for key in KEYS
    ]
    before = [(part, key, part.__dict__.get(key, ABSENT)) for part, key, _ in changes]
    try:
        for change in changes:
            _put(*change)
        yield
    finally:
        for change in before:
            _put(*change)


def _put(config: PreTrainedConfig, key: str, value: Any) -> None:
    """Set a plain attribute of a config, or remove it."""
    if value is ABSENT:
        config.__dict__.pop(key, None)
    else:
        config.__dict__[key] = value


def _check_inside(installation: Installation) -> None:
    """Check that every swap in a model belongs to a module that the block counts, and that all of the model can run.

    Raises:
        ValueError: a swap is not counted, or some other module in the model cannot run through our attention function.
    """
    model = installation.root
    counted = {id(swap) for layer in installation.layers() for swap in layer.copies}
    for name, module in model.named_modules():
        if isinstance(module, Swap) and id(module) not in counted:
            raise ValueError(
                f"{type(model).__name__}: {name} is swapped in a larger model, but cannot be swapped in this part, "
                "so the part would load with stock attention; save the whole model."
            )
    if (reason := obstacle(model, installation.sites)) is not None:
        raise ValueError(
            f"{type(model).__name__} holds a swapped part, but {reason}; save the swapped part alone, or call "
            "unpatch_model on it."
        )


def _check_config(installation: Installation) -> None:
    """Check that the config, with its block, builds the attention modules and swaps of the model.

    A class that needs more than its config is left alone: only its user can build it, and loading compares the numbers
    of modules.

    Raises:
        ValueError: the config builds another model, or no model at all.
    """
    model = installation.root
    name, cls = type(model).__name__, type(model)
    try:
        inspect.signature(cls).bind(model.config)
    except TypeError:
        return
    try:
        config = type(model.config).from_dict(model.config.to_dict())
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("meta"),
            initialization.no_init_weights(),
            initialization.meta_device_safe_creation_ops(),
        ):
            built = cls(config)
    except Exception as problem:  # any error of the model's own code
        raise ValueError(
            f"{name} could not be loaded again, because its config does not build a model ({type(problem).__name__}: "
            f"{problem}); change the config as you changed the layers, or save the whole model."
        ) from problem
    here, there = _layout(installation), _layout(Installation(built, Record()))
    if len(here) != len(there):
        raise ValueError(
            f"{name} has {len(here)} attention modules that can be swapped, but its config builds {len(there)}, so the "
            "saved model could not be loaded; change the config as you changed the layers (for example "
            "model.config.num_hidden_layers), then save."
        )
    if here != there:
        raise ValueError(
            f"{name}: its config builds other attention modules than the model has, so the saved model would compute "
            "something else; change the config as you changed the model, or save the whole model."
        )


def _layout(installation: Installation) -> list[tuple[Any, ...]]:
    """What must be equal in a model and in the model that its config builds: each module's class, sizes and swap."""
    layers: list[tuple[Any, ...]] = []
    for layer in installation.numbered():
        site, spec, order = layer.site, None, None
        if layer.swapped:
            swap = layer.swap
            spec = swap.spec()
            order = swap.wiring.order if swap.carries and swap.wiring is not None else None
        layers.append((stock_class(site.core).__name__, site.geometry(), spec, order))
    return layers
