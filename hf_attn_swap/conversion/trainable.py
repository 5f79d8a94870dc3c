"""What trains in a swapped model, and what a training changes beside it.

What trains: parts of the model by name, in any family, or LoRA adapters around it. What else a training changes: modes,
configs, a wrapped forward.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ..families import Site
from ..layer.swap import Swap
from ..patch import need_installation
from ..variants.base import Variant
from ..wiring.install import model_root

EVERYTHING, BODY, VECTORS = "all", "body", "vectors"
PARTS = ("query", "key", "value", "output", "swap")


def part_of(model: nn.Module, part: str) -> list[nn.Module]:
    """Return one part of every swapped layer: a projection ("query", "key", "value" or "output"), or the "swap".

    Raises:
        ValueError: the part is unknown, the model is not patched, or the package does not know the projection's name.
    """
    return [site_part(layer.site, part) for layer in need_installation(model).layers()]


def site_part(site: Site, part: str) -> nn.Module:
    """Return one part of one layer. If one module holds several projections, each of them gives that module.

    Raises:
        ValueError: the part is unknown, or the package does not know the projection's name.
    """
    if part not in PARTS:
        raise ValueError(f"{part!r} is not a part of an attention block; choose one of {', '.join(PARTS)}.")
    if part == "swap":
        swap = site.core.attn_swap
        assert isinstance(swap, nn.Module)
        return swap
    holder = site.container if part == "output" else site.core
    path = getattr(site.family, part)
    if path is None:
        raise ValueError(
            f"{site.path}: the package does not know which module is the {part} projection; choose other parts."
        )
    return holder.get_submodule(path)


def vectors_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of one dimension (norms, biases) outside of the embeddings and the head."""
    return [parameter for parameter in _body_of(model) if parameter.dim() == 1]


def _body_of(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model but those of its embeddings and its head."""
    head = model_root(model).get_output_embeddings()
    apart = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    others = {id(parameter) for module in apart for parameter in module.parameters()}
    return [parameter for parameter in model.parameters() if id(parameter) not in others]


def choose_trainable(model: nn.Module, trainable: Iterable[str] | str | None) -> None:
    """Freeze every parameter but the chosen ones.

    Args:
        model: a patched model, or PEFT's wrapper around it.
        trainable: "all", "body" (all but the embeddings and the head), or any of `PARTS` and "vectors" (parameters of
            one dimension in the body, such as norms and biases). None changes nothing.

    Raises:
        ValueError: a name is unknown, or nothing trains.
    """
    names = (trainable,) if isinstance(trainable, str) else tuple(trainable or ())
    if names == (EVERYTHING,):
        model.requires_grad_(True)
    elif names == (BODY,):
        model.requires_grad_(False)
        for parameter in _body_of(model):
            parameter.requires_grad_(True)
    elif names:
        if not set(names) <= {*PARTS, VECTORS}:
            raise ValueError(
                f"trainable: {names!r} must be some of {', '.join((*PARTS, VECTORS))}, or {EVERYTHING!r} or {BODY!r} "
                "alone."
            )
        model.requires_grad_(False)
        for name in names:
            for trained in vectors_of(model) if name == VECTORS else part_of(model, name):
                trained.requires_grad_(True)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError("there is nothing to train; name parts in `trainable`, or add adapters.")


def with_adapters(model: PreTrainedModel, rank: int) -> PeftModel:
    """Put LoRA adapters on all matrices but the head, and let the variant's own parameters train as they are."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Swap))
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not name.startswith(inside or ("\0",))
    ]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # PEFT sees by itself how Conv1D lies
        wrapped: PeftModel = get_peft_model(model, config)
    for module in wrapped.modules():
        if isinstance(module, Variant):
            module.requires_grad_(True)
    return wrapped


def adapted_weights(model: nn.Module) -> list[nn.Parameter]:
    """The weights that a merge of the adapters changes."""
    return [
        parameter
        for module in model.modules()
        if isinstance(module, BaseTunerLayer)
        for parameter in module.get_base_layer().parameters()
    ]


def refuse_adapters(model: nn.Module) -> None:
    """Refuse a model with adapters of the user's own: the conversion takes its own adapters off at the end.

    Raises:
        ValueError: the model has adapters of PEFT.
    """
    if any(isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)) for module in model.modules()):
        raise ValueError(
            "the model has adapters of PEFT, which a conversion would lose; merge them into the weights first: "
            "model = model.merge_and_unload()."
        )


LEFT = ("forward", "_original_forward", "_is_accelerate_prepared")  # what accelerate sets on a model that it trains


@contextlib.contextmanager
def preserve_training_state(model: nn.Module) -> Iterator[None]:
    """Afterwards the model is as before in all but its weights, also after an error.

    This means training modes, `requires_grad`, gradients, `forward`, `use_cache` in the configs, and activation
    checkpointing.

    What is new inside the model (a swap) has the mode of the module that holds it, and its parameters require
    gradients, as `patch_model` leaves them.
    """
    modes = {id(module): (module, module.training) for module in model.modules()}
    flags = {id(parameter): (parameter, parameter.requires_grad) for parameter in model.parameters()}
    without_gradient = [parameter for parameter in model.parameters() if parameter.grad is None]
    having: list[Any] = [module for module in model.modules() if hasattr(getattr(module, "config", None), "use_cache")]
    caching = [(module, module.config.use_cache) for module in having]
    checkpointed = _checkpoints(model)
    holders = [module for module in {model, model_root(model)} if not any(name in vars(module) for name in LEFT)]
    try:
        yield
    finally:
        for module, training in modes.values():
            module.training = training
        for module, _ in modes.values():
            for child in module.children():
                if id(child) not in modes:
                    child.train(module.training)
        for parameter in model.parameters():
            new = parameter.is_floating_point()  # 8-bit integers have no gradient
            parameter.requires_grad_(flags[id(parameter)][1] if id(parameter) in flags else new)
        for parameter in without_gradient:
            parameter.grad = None
        for module, use_cache in caching:
            module.config.use_cache = use_cache  # perhaps another config than before: a swap brings its own
        if _checkpoints(model) and not checkpointed:
            _without_checkpointing(model_root(model))
        for holder in holders:
            for name in LEFT:
                vars(holder).pop(name, None)


@contextlib.contextmanager
def preserve_training_flags(model: nn.Module) -> Iterator[None]:
    """Afterwards the same parameters require gradients as before."""
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of a model and of the models inside, each once."""
    configs = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config:
            configs[id(config)] = config
    return list(configs.values())


def _checkpoints(model: nn.Module) -> bool:
    """True if activation checkpointing is on."""
    return any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def _without_checkpointing(root: PreTrainedModel) -> None:
    """Switch activation checkpointing off, under the name that this transformers does not warn about."""
    new = hasattr(root, "activation_checkpointing_disable")
    getattr(root, f"{'activation' if new else 'gradient'}_checkpointing_disable")()
    root.disable_input_require_grads()


@contextlib.contextmanager
def own_precision(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes in the precision of its weights, also while a training runs it under autocast."""
    original = vars(model).get("_original_forward")
    if original is None:
        yield
        return
    wrapped = model.forward
    model.forward = original
    try:
        yield
    finally:
        model.forward = wrapped
