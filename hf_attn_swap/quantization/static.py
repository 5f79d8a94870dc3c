"""Runs the projections of a model in 8-bit integers, with static ranges, and keeps them so in a checkpoint.

The inputs of every Linear are rounded to 256 values of one range per module, the weights to one step per row, and the
products are added in 32 bits (`linear.py`). Norms, attention, embeddings and heads stay in floating point.
`save_pretrained` writes the integers in the format int-quantized of compressed-tensors. `from_pretrained` reads it with
that package, and then computes in floating point with equal rounding; `int8_loaded` gives the model its integers back.
docs/mathematics.md, section Quantisation to 8 bits.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedConfig

from ..measuring.batches import as_batches, forward
from ..wiring.install import installation_of, model_root
from .linear import WIDEST, Int8Linear
from .places import quantizable

M = TypeVar("M", bound=nn.Module)
Range = tuple[float, float]  # the lowest and the highest input of a Linear; 0 lies between them

FORMAT = "int-quantized"
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def input_ranges(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, Range]:
    """The lowest and the highest input of every Linear that `int8_static` can round, over all batches.

    A module that no batch reaches has no range, and `int8_static` leaves it in floating point.

    Args:
        model: a `PreTrainedModel`, stock or swapped, in evaluation mode.
        batches: dicts of tensors, from the training data; labels are ignored.

    Returns:
        The ends of each range, which always holds 0, by the module's path.

    Raises:
        ValueError: there is no batch, the model is in training mode, no Linear can be rounded, or an input is not
            finite.
    """
    if model.training:
        raise ValueError("8-bit ranges are fitted in evaluation; call model.eval() first.")
    root = model_root(model)
    found: dict[str, Range] = {}
    with contextlib.ExitStack() as hooked:
        for path, linear in _linears(root).items():
            hooked.callback(linear.register_forward_pre_hook(_observe(path, found)).remove)
        for batch in tqdm(as_batches(batches), desc="8-bit ranges", unit="batch", leave=False):
            forward(root, batch)
    return found


def _observe(path: str, found: dict[str, Range]) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        low, high = (float(end) for end in torch.aminmax(args[0]))
        if not math.isfinite(low + high):
            raise ValueError(f"the input of {path} is not finite; check the weights, the inputs and the dtype.")
        before = found.get(path, (0.0, 0.0))
        found[path] = min(before[0], low), max(before[1], high)

    return hook


def int8_static(model: M, ranges: Mapping[str, Range], *, symmetric: bool = False) -> M:
    """Put modules with int8 weights and static 8-bit inputs in the place of Linears, in place.

    On a CPU they run PyTorch's integer matrix product; elsewhere they compute the same in floating point.
    The weights cannot be restored: to undo the quantisation, load the model again.
    `model.save_pretrained` saves the integers; see `int8_loaded`.

    Args:
        model: a `PreTrainedModel`, stock or swapped, in floating point and without adapters.
        ranges: the lowest and the highest input of each Linear, by its path, as `input_ranges` gives them. A Linear
            without a range stays as it is.
        symmetric: True rounds the inputs to a range from -r to r, for engines that know no other.

    Returns:
        The same model.

    Raises:
        ValueError: there is no range, a path is no Linear that can be rounded, or the model is quantised already, has
            adapters, Conv1D, tied projections, hooks on them, offloaded weights or weights that are not finite. The
            model is then unchanged.
    """
    root = model_root(model)
    linears = _linears(root)
    if not ranges:
        raise ValueError("there are no ranges; pass what input_ranges(model, batches) returned.")
    if unknown := sorted(set(ranges) - set(linears)):
        raise ValueError(
            f"{unknown[0]!r} is no projection of this {type(root).__name__} that can be rounded; leave it out of the "
            "ranges. Task heads and gates stay in full precision."
        )
    _refuse_tied(root, {path: linears[path] for path in ranges})
    made: dict[nn.Module, nn.Module] = {}
    for path, (low, high) in ranges.items():
        linear = linears[path]
        _check(path, linear, low, high)
        made[linear] = Int8Linear.rounded(linear.weight, linear.bias, low, high, symmetric=symmetric)
    _replace(root, made)
    _describe(root, symmetric)
    return model


def int8_loaded(model: M) -> M:
    """Let a model that `from_pretrained` loaded in 8 bits compute with integers again, in place.

    Call it before the first forward pass, in which compressed-tensors turns the weights into floating point.
    The checkpoint may come from `int8_static` or from another program that writes static ranges.

    Returns:
        The same model.

    Raises:
        ValueError: the model has no int8 weights with static ranges, or has run already.
    """
    root = model_root(model)
    loaded = {module: stored for module in root.modules() if (stored := _stored(module)) is not None}
    if not loaded:
        raise ValueError(
            f"this {type(root).__name__} has no int8 weights with static ranges. Load a checkpoint that was saved "
            "after int8_static, and call int8_loaded before the model runs: its first pass makes the weights floats."
        )
    zeros = [module.input_zero_point for module in loaded.values()]
    quantizer: Any = root.hf_quantizer
    quantizer.compressor.remove_decompression_hook(root)
    _replace(root, loaded)
    quantizer.remove_quantization_config(root)
    _describe(root, not any(bool(zero.any()) for zero in zeros))
    return model


def _stored(module: nn.Module) -> Int8Linear | None:
    """The integer module for a Linear as compressed-tensors loads it; None for any other module."""
    scheme: Any = getattr(module, "quantization_scheme", None)
    inputs = getattr(scheme, "input_activations", None)
    if not isinstance(module, nn.Linear) or module.weight.dtype != torch.int8 or inputs is None:
        return None
    zero = getattr(module, "weight_zero_point", None)
    if inputs.num_bits != 8 or inputs.dynamic or inputs.strategy != "tensor" or (zero is not None and bool(zero.any())):
        return None
    held: Any = module
    zero = getattr(held, "input_zero_point", None)
    return Int8Linear(
        held.weight.data,
        held.bias,
        held.weight_scale.data,
        held.input_scale.data,
        torch.zeros(1, dtype=torch.int8) if zero is None else zero.data,
    )


def _linears(root: Any) -> dict[str, nn.Linear]:
    """The projections of a model that can be rounded, by their paths.

    Raises:
        ValueError: there is none, or the model cannot be rounded as a whole.
    """
    if getattr(root, "hf_quantizer", None) is not None or any(
        isinstance(module, Int8Linear) for module in root.modules()
    ):
        raise ValueError(f"this {type(root).__name__} has rounded weights already; load it in full precision.")
    if any(hasattr(module, "base_layer") for module in root.modules()):
        raise ValueError("adapters are not rounded; merge them first: model = model.merge_and_unload().")
    chosen = dict(quantizable(root))
    if any(type(module).__name__ == "Conv1D" for module in chosen.values()):
        raise ValueError(
            f"{type(root).__name__} has Conv1D, which checkpoints of 8-bit integers do not know; fake_w8a8 shows what "
            "8 bits cost."
        )
    found = {path: module for path, module in chosen.items() if type(module) is nn.Linear}
    if not found:
        raise ValueError(f"{type(root).__name__} has no Linear outside its head; there is nothing to round.")
    return found


def _check(path: str, linear: nn.Linear, low: float, high: float) -> None:
    """Refuse a Linear that cannot be replaced without a loss that nobody sees.

    Raises:
        ValueError: says which and why.
    """
    if not (low <= 0 <= high and math.isfinite(low) and math.isfinite(high)):
        raise ValueError(f"the range of {path} must be two finite numbers around 0, got {low} and {high}.")
    if linear.weight.is_meta:
        raise ValueError(f"the weights of {path} are offloaded; load the model without offloading.")
    if not linear.weight.is_floating_point():
        raise ValueError(f"{path} has rounded weights already; load the model in full precision.")
    if not bool(linear.weight.isfinite().all()):
        raise ValueError(f"{path}.weight is not finite; check the checkpoint.")
    if linear.in_features > WIDEST:
        raise ValueError(f"{path} adds {linear.in_features} products, and 32 bits hold {WIDEST}; leave it out.")
    if any(getattr(linear, name) for name in HOOKS):
        raise ValueError(f"{path} has hooks, which would be lost; remove them first.")


def _replace(root: nn.Module, made: Mapping[nn.Module, nn.Module]) -> None:
    """Put modules in the place of others, wherever a module of the model holds these."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if child in made:
                setattr(parent, name, made[child].train(child.training))


def _refuse_tied(root: nn.Module, linears: Mapping[str, nn.Linear]) -> None:
    """Refuse a projection that shares its weights with another module, which would keep them in floating point.

    Raises:
        ValueError: names the two.
    """
    owners: dict[int, list[str]] = {}
    for name, weight in root.named_parameters(remove_duplicate=False):
        owners.setdefault(id(weight), []).append(name)
    for path, linear in linears.items():
        modules = {name.rpartition(".")[0] for name in owners[id(linear.weight)]}
        others = sorted(name for name in modules if root.get_submodule(name) is not linear)
        if others:
            raise ValueError(f"{path} shares its weights with {others[0]}; leave it out of the ranges.")


def _describe(root: Any, symmetric: bool) -> None:
    """Let the config say how the integers are read, in a copy: other models may share the config.

    Everything that is still a Linear is named as one to leave alone.
    """
    if installation_of(root) is None:  # a patched model has copies already
        memo: dict[int, Any] = {}
        for module in root.modules():
            if isinstance(module.__dict__.get("config"), PreTrainedConfig):
                module.__dict__["config"] = copy.deepcopy(module.__dict__["config"], memo)
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "tensor", "dynamic": False}
    root.config.quantization_config = {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": [path for path, module in root.named_modules() if isinstance(module, nn.Linear)],
    }
