"""Swaps the attention of a loaded model in place, sets the strength, and restores the stock model bit for bit."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from .describe import NOTHING
from .families import Site, obstacle
from .layer.registry import Options, fit_options, parse, parse_options
from .layer.swap import Swap
from .tested import tell_if_newer
from .variants.base import Variant
from .wiring import carrying, ordering
from .wiring.blocks import BLOCKS, Block
from .wiring.device_and_dtype import device_and_dtype
from .wiring.install import Installation, Record, installation_of, model_root
from .wiring.layers import Layer

M = TypeVar("M", bound=nn.Module)


def patch_model(
    model: M,
    variant: str,
    /,
    *,
    layers: int | Iterable[int] | None = None,
    modules: str | None = None,
    strength: float = 1.0,
    **options: Any,
) -> M:
    """Replace the self-attention of a loaded transformers model by a variant, in place. The model keeps its weights.

    Args:
        model: a `PreTrainedModel`, or a wrapper around a `PreTrainedModel` (PEFT). The model gets its own copy of its
            config.
        variant: a name from `list_variants()`, or a composition such as "outeffhop+gated".
        layers: the numbers of the layers to swap; None means all. The numbers count the self-attention modules that
            can be swapped, in module order, from 0; cross-attention does not count. Other layers keep their
            attention. A layer that is already swapped gets the new variant.
        modules: swap only inside these modules, for example "language_model" in a vision-language model: a dotted
            part of a module's path, or a regular expression for such a part. `layers` then counts inside these modules.
        strength: a number from 0 (the pretrained model) to 1 (the paper's formula). `set_strength` changes it later.
        options: the options of the variant; for a composition, one dict per variant.

    Returns:
        The same model.

    Raises:
        ValueError: a name, an option, a layer or the strength is wrong; a variant does not fit the sizes of a module;
            nothing can be swapped; or only a part of the model is patched already. The model is then unchanged.

    The first call of a process logs one line if the installed transformers is newer than the tested ones.
    """
    installation, swaps = _build(model, variant, options, layers=layers, modules=modules, strength=strength)
    _warn_of_loss(swaps)
    _put(model, installation, swaps)
    _warn_user(installation.root, swaps.values())
    return model


def replace_swaps(model: nn.Module, variant: str, options: Mapping[str, Any]) -> None:
    """As `patch_model` in all layers, for a step that made the former swaps itself: their loss is no warning."""
    _put(model, *_build(model, variant, options))


def _build(
    model: nn.Module,
    variant: str,
    options: Mapping[str, Any],
    *,
    layers: int | Iterable[int] | None = None,
    modules: str | None = None,
    strength: float = 1.0,
) -> tuple[Installation, dict[Layer, Swap]]:
    """The new swap of each chosen layer, and the installation that they are for. The model does not change.

    Raises:
        ValueError: as `patch_model`.
    """
    classes = parse(variant)
    chosen = parse_options(classes, options)
    strength = check_strength(strength)
    tell_if_newer()  # before a refusal that may come from the newer version
    root = model_root(model)
    installation = installation_of(root) or Installation(root, Record())
    every = swappable(installation)
    swaps = {
        layer: build_swap(layer, classes, chosen, strength=strength, selection=modules)
        for layer in choose_layers(every, layers, modules)
    }
    planned = [replace(layer, copies=(swaps[layer],)) if layer in swaps else layer for layer in every]
    carrying.check(root, planned)
    ordering.check(root, planned)
    for layer, swap in swaps.items():
        swap.retrained = layer.swapped and layer.swap.retrained
    return installation, swaps


def _put(model: nn.Module, installation: Installation, swaps: Mapping[Layer, Swap]) -> None:
    """Put swaps in, as the first of a stock model or in place of others."""
    if installation_of(installation.root) is None:
        installation.start(model)
    installation.put(swaps)


def unpatch_model(model: M, /, *, layers: int | Iterable[int] | None = None) -> M:
    """Take swaps out, in place. Without any swap the model is bit for bit the stock model, with its former config.

    Args:
        model: a patched model.
        layers: the numbers of the layers that lose their swap, as in `patch_model`; None means all swapped layers.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not patched, or a layer is not swapped.
    """
    installation = need_installation(model)
    swapped = installation.layers()
    chosen = swapped if layers is None else choose_layers(swappable(installation), layers, None)
    _refuse_stock(chosen, swapped)
    if len(chosen) == len(swapped):
        installation.remove(model)
    else:
        installation.take_out(chosen)
    return model


def set_strength(
    model: M, strength: float, /, *, layers: int | Iterable[int] | None = None, modules: str | None = None
) -> M:
    """Set the strength of swapped layers, in place.

    Args:
        model: a patched model.
        strength: a number from 0 (the pretrained model) to 1 (the paper's formula).
        layers: the numbers of the layers, as in `patch_model`; None means all swapped layers.
        modules: choose only layers inside these modules, as in `patch_model`.

    Returns:
        The same model.

    Raises:
        ValueError: the strength does not lie between 0 and 1, the model is not patched, or a layer is not swapped.
    """
    strength = check_strength(strength)
    installation = need_installation(model)
    swapped = installation.layers()
    chosen = choose_layers(swappable(installation), layers, modules)
    if layers is None:
        chosen = [layer for layer in chosen if layer.swapped]
        if not chosen:
            raise ValueError(f"no swapped layer lies in modules={modules!r}; swapped are layers {_numbers(swapped)}.")
    _refuse_stock(chosen, swapped)
    installation.set_strength(dict.fromkeys(chosen, strength))
    return model


def _refuse_stock(chosen: Iterable[Layer], swapped: Iterable[Layer]) -> None:
    """Refuse a choice of layers that are not all swapped.

    Raises:
        ValueError: a chosen layer is not swapped.
    """
    if missing := [layer.number for layer in chosen if not layer.swapped]:
        raise ValueError(f"layers {missing} are not swapped; swapped are {_numbers(swapped)}.")


def _numbers(layers: Iterable[Layer]) -> list[int]:
    return [layer.number for layer in layers]


def need_installation(model: nn.Module) -> Installation:
    """The installation of a patched model.

    Raises:
        ValueError: the model is not patched.
    """
    installation = installation_of(model_root(model))
    if installation is None:
        raise ValueError("this model is not patched; call patch_model on it first.")
    return installation


def swappable(installation: Installation) -> tuple[Layer, ...]:
    """The layers that can be swapped, swapped or not, in module order. The option `layers` counts these.

    Args:
        installation: a model, patched or not.

    Raises:
        ValueError: nothing in this model can be swapped (the error says why), or tensor parallelism splits the heads
            of the model over several processes.
    """
    root, sites = installation.root, installation.sites
    _refuse_tensor_parallel(root)
    name = type(root).__name__
    if usable := installation.numbered():
        if (reason := obstacle(root, sites)) is not None:
            raise ValueError(f"{name}: {reason}; use the stock attention for this model.")
        return usable
    if not sites:
        raise ValueError(f"{name}: {NOTHING}.")
    reasons = sorted({f"{type(site.core).__name__}: {site.refused or 'cross-attention'}" for site in sites})
    reasons += [f"{name}: attention in the model's own code" for name in _own_attention(root, sites)]
    raise ValueError(f"{name}: nothing can be swapped ({'; '.join(reasons)}).")


def _own_attention(root: nn.Module, sites: Iterable[Site]) -> list[str]:
    """The classes called attention that hold nothing that asks for an attention function; for a sentence alone."""
    cores = {id(site.core) for site in sites}
    own = (
        module
        for module in root.modules()
        if type(module).__name__.endswith("Attention") and not any(id(part) in cores for part in module.modules())
    )
    return sorted({type(module).__name__ for module in own})


def _refuse_tensor_parallel(root: nn.Module) -> None:
    """Refuse a model whose heads are split over several processes.

    Raises:
        ValueError: the model was loaded with tensor parallelism.
    """
    processes = getattr(root, "_tp_size", None) or 1
    if processes > 1:
        raise ValueError(
            f"{type(root).__name__} is split over {processes} processes by tensor parallelism, so that each computes a "
            "part of the heads; a swap is built for all heads of a layer. Load the model without tp_plan, for example "
            'with device_map="auto".'
        )


def build_swap(
    layer: Layer,
    classes: tuple[type[Variant], ...],
    options: Options,
    *,
    strength: float = 1.0,
    selection: str | None = None,
) -> Swap:
    """Make a new child for one attention module, on the module's device and in its dtype.

    New parameters come from a generator of their own, whose seed is the layer's number.

    Args:
        layer: the layer; its module is not changed.
        classes: the variants.
        options: the options of each variant, by the variant's name, complete with defaults. The variants fit them to
            the kind of the module.
        strength: the strength, a number from 0 to 1.
        selection: the argument `modules` that chose the layer, or None.

    Raises:
        ValueError: a variant does not fit the module.
    """
    site = layer.site
    device, dtype = device_and_dtype(site.container, site.core)
    try:
        fitted, sizes = fit_options(classes, options, site.kind), site.geometry()
        with device:  # whatever the default device is: from a meta tensor nothing could be moved
            swap = Swap(classes, fitted, sizes, strength=strength, selection=selection)
    except ValueError as problem:
        raise ValueError(f"{site.path}: {problem}") from None
    if site.resized is not None and not swap.changed.keys().isdisjoint(("read", "write")):
        raise ValueError(
            f"{site.path}: {'+'.join(swap.names)} needs an output like the input, but of {type(site.core).__name__} "
            f"{site.resized}; leave these layers out (modules= or layers=), or use a variant that changes only how "
            "scores become weights."
        )
    if site.packed is not None and swap.reads_input:
        raise ValueError(
            f"{site.path}: {'+'.join(swap.names)} needs every token's own row, but {type(site.core).__name__} "
            f"cannot give them: {site.packed}; leave these layers out (modules= or layers=), or use a variant that "
            "changes only how scores become weights."
        )
    if site.biased is not None and swap.replaces:
        raise ValueError(
            f"{site.path}: {type(site.core).__name__} {site.biased}, but {'+'.join(swap.names)} computes no scores, so "
            "this has no place in it; use another variant, or leave these layers out (modules= or layers=)."
        )
    if site.query_scale is None and swap.replaces:
        raise ValueError(
            f"{site.path}: {type(site.core).__name__} scales its queries by a factor that hf_attn_swap cannot read, "
            f"but {'+'.join(swap.names)} needs them unscaled; use another variant, or leave these layers out "
            "(modules= or layers=)."
        )
    wrapped = "forward" in site.container.__dict__ and not isinstance(site.container, Block)
    if wrapped and swap.writes and site.family.block in BLOCKS:
        raise ValueError(f"{site.path}: its forward is already wrapped (device dispatch); patch the model before.")
    if swap.writes and site.family.output is None:
        raise ValueError(
            f"{site.path}: {'+'.join(swap.names)} acts after W_o, which {type(site.core).__name__} leaves to another "
            "module that hf_attn_swap does not know; use a variant that changes only what comes before W_o."
        )
    swap.to(device=device, dtype=dtype)
    swap.seed = layer.number
    if device.type != "meta":
        swap.reset(layer.number)
    return swap.train(site.core.training)


def choose_layers(every: Sequence[Layer], layers: int | Iterable[int] | None, modules: str | None) -> list[Layer]:
    """The chosen layers, in module order.

    Args:
        every: the layers that can be swapped.
        layers: as in `patch_model`. With `modules`, the numbers count inside these modules.
        modules: as in `patch_model`.

    Raises:
        ValueError: `modules` is no regular expression or fits no module, or `layers` is wrong (see `check_layers`).
    """
    if modules is None:
        return [every[number] for number in check_layers(layers, len(every))]
    if not isinstance(modules, str) or not modules:
        raise ValueError(f"modules must be a part of a module path such as 'language_model', got {modules!r}.")
    try:
        pattern = re.compile(rf"(^|\.)(?:{modules})(\.|$)")
    except re.error as problem:
        raise ValueError(f"modules={modules!r} is no regular expression ({problem}).") from None
    inside = [layer for layer in every if pattern.search(layer.path)]
    if not inside:
        starts = sorted({re.split(r"\.\d", layer.path)[0] for layer in every})
        raise ValueError(f"modules={modules!r} fits no swappable attention module; they lie in {', '.join(starts)}.")
    return [inside[number] for number in check_layers(layers, len(inside))]


def check_strength(strength: Any) -> float:
    """The strength as a float.

    Raises:
        ValueError: `strength` is not a number from 0 to 1.
    """
    if isinstance(strength, bool) or not isinstance(strength, (int, float)) or not 0 <= strength <= 1:
        raise ValueError(f"strength must be a number from 0 (the pretrained model) to 1, got {strength!r}.")
    return float(strength)


def check_layers(layers: int | Iterable[int] | None, count: int) -> list[int]:
    """The sorted numbers of the chosen layers among `count` layers, each number once.

    Raises:
        ValueError: `layers` holds something else than whole numbers, is empty, or names a layer that does not exist.
    """
    if layers is None:
        return list(range(count))
    if isinstance(layers, (str, bytes)) or not isinstance(layers, (int, Iterable)):
        raise ValueError(f"layers must be whole numbers such as [0, 3] or range(6), got {layers!r}.")
    chosen = [layers] if isinstance(layers, int) else list(layers)
    if not chosen or any(isinstance(index, bool) or not isinstance(index, int) for index in chosen):
        raise ValueError(f"layers must be whole numbers such as [0, 3] or range(6), got {chosen!r}.")
    if wrong := [index for index in chosen if not 0 <= index < count]:
        raise ValueError(f"layers {wrong} do not exist; this model has swappable layers 0 to {count - 1}.")
    return sorted(set(chosen))


def _warn_of_loss(layers: Iterable[Layer]) -> None:
    """Warn about what a conversion or a training left in swaps that are about to leave their layers."""
    lost: dict[str, list[int]] = {}
    for layer in layers:
        if not layer.swapped:
            continue
        swaps = layer.copies
        words = sorted({fit.words() for swap in swaps for fit in swap.fitted.values()})
        words += ["trained parameters"] if any(swap.trained for swap in swaps) else []
        words += ["weights that were trained for it"] if any(swap.retrained for swap in swaps) else []
        if words:
            lost.setdefault(f"{'+'.join(swaps[0].names)} ({', '.join(words)})", []).append(layer.number)
    for what, numbers in lost.items():
        warnings.warn(
            f"layers {numbers} lose the converted {what}; save the model before you patch it again, or leave these "
            "layers out (layers=).",
            stacklevel=3,
        )


def _warn_user(root: nn.Module, swaps: Iterable[Swap]) -> None:
    """Warn about a variant on a pretrained model, and about new parameters that come too late for something else."""
    swaps = list(swaps)
    sentences = {variant.warn() for swap in swaps for variant in swap.variants}
    for sentence in sorted(filter(None, sentences)):
        warnings.warn(sentence, stacklevel=3)
    if all(next(swap.parameters(), None) is None for swap in swaps):
        return
    names = "+".join(swaps[0].names)
    if any(type(parameter).__name__ == "DTensor" for parameter in root.parameters()):
        warnings.warn(
            f"{names} adds parameters after the model was sharded, so the new parameters are not sharded; patch the "
            "model first, then shard it.",
            stacklevel=3,
        )
    held = {id(parameter) for parameter in root.parameters()}
    kinds = _with_subclasses(
        torch.optim.Optimizer
    )  # looking a type up in a set is several times faster than issubclass
    optimizers = [thing for thing in gc.get_objects() if type(thing) in kinds]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if any(id(parameter) in held for group in groups for parameter in group["params"]):
        warnings.warn(
            f"{names} adds parameters that the optimizer you already made does not know; patch the model before you "
            "make the optimizer, or add the new parameters with optimizer.add_param_group.",
            stacklevel=3,
        )


def _with_subclasses(cls: type[Any]) -> set[type[Any]]:
    """A class and all its subclasses."""
    return {cls}.union(*map(_with_subclasses, cls.__subclasses__()))


def softmax_swaps(installation: Installation) -> dict[Layer, Swap]:
    """A swap with ordinary attention for every swapped layer, to watch the stock model."""
    classes = parse("softmax")
    options = parse_options(classes, {})
    return {layer: build_swap(layer, classes, options) for layer in installation.layers()}
