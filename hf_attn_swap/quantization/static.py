"""Rounds the projections of a model to 8-bit integers, and runs them so.

The inputs of every Linear are rounded to 256 values of one range per module (static), or of one range per token
(dynamic), the weights to one step per row, and the products are added in 32 bits (`linear.py`). Norms, attention,
embeddings and heads stay in floating point. `checkpoint.py` has how such a model is saved and loaded.
docs/mathematics.md, section Quantisation to 8 bits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..measuring.batches import as_batches, forward
from ..text.bar import bar
from ..wiring.install import model_root
from .checkpoint import describe, replace
from .linear import WIDEST, Int8Linear
from .places import quantizable, refuse_stacked
from .points import Point, Range

M = TypeVar("M", bound=nn.Module)

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def input_ranges(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> dict[str, Range]:
    """The range of the inputs of every Linear that `int8_static` can round.

    An end is a running mean of the lowest, or highest, input of each batch, as in `fake_w8a8`. So a single number that
    is far from all others is cut off, and does not make the steps of all others coarse. Later batches weigh more: mix
    kinds of text. A module that no batch reaches has no range, and `int8_static` leaves it in floating point.

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
    linears = _linears(root)
    points = {path: Point(f"{path}.input") for path in linears}
    seen: dict[str, list[Tensor]] = {path: [] for path in linears}  # the ends in one pass: a module may run often in it
    with contextlib.ExitStack() as hooked:
        for path, linear in linears.items():
            hooked.callback(linear.register_forward_pre_hook(_notes_ends(seen[path])).remove)
        for batch in bar(as_batches(batches), desc="8-bit ranges", unit="batch", leave=False):
            forward(root, batch)
            for path, ends in seen.items():
                if ends:
                    points[path].observe(torch.stack(ends))
                ends.clear()
    return {path: (point.low, point.high) for path, point in points.items() if point.seen}


def _notes_ends(ends: list[Tensor]) -> Any:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        ends.extend(torch.aminmax(args[0]))

    return hook


def int8_static(model: M, ranges: Mapping[str, Range], *, symmetric: bool = False) -> M:
    """Put modules with int8 weights and static 8-bit inputs instead of Linears, in place.

    On a CPU they run PyTorch's integer matrix product; elsewhere they compute the same in floating point.
    The weights cannot be restored: to undo the quantisation, load the model again.
    `model.save_pretrained` saves the integers; see `int8_loaded`.

    Args:
        model: a `PreTrainedModel`, stock or swapped, in floating point and without adapters.
        ranges: the ends of the range of each Linear's inputs, by its path, as `input_ranges` gives them. A Linear
            without a range stays as it is.
        symmetric: True rounds the inputs to a range from -r to r, for engines that know no other.

    Returns:
        The same model.

    Raises:
        ValueError: there is no range, a path is no Linear that can be rounded, or the model is quantised already, has
            adapters, Conv1D, experts that are no Linears, tied projections, hooks on them, offloaded weights or weights
            that are not finite. The model is then unchanged.
    """
    if not ranges:
        raise ValueError("there are no ranges; pass what input_ranges(model, batches) returned.")
    _put(model_root(model), ranges, symmetric)
    return model


def int8_dynamic(model: M) -> M:
    """Put modules with int8 weights and inputs of 8 bits per token instead of Linears, in place.

    Each token has its own range, from -max |x| to max |x|, found as it comes: nothing is fitted, and a token with large
    activations makes no other token coarse. Everything else is as in `int8_static`.

    Args:
        model: a `PreTrainedModel`, stock or swapped, in floating point and without adapters.

    Returns:
        The same model.

    Raises:
        ValueError: as `int8_static`.
    """
    root = model_root(model)
    _put(root, per_token(root), symmetric=True)
    return model


def per_token(root: nn.Module) -> dict[str, None]:
    """A range per token for every Linear that can be rounded, by its path, in place of what `input_ranges` gives.

    Raises:
        ValueError: as `int8_static`.
    """
    return dict.fromkeys(_linears(root))


def _put(root: Any, ranges: Mapping[str, Range | None], symmetric: bool) -> None:
    linears = _linears(root)
    if unknown := sorted(set(ranges) - set(linears)):
        raise ValueError(
            f"{unknown[0]!r} is no projection of this {type(root).__name__} that can be rounded; leave it out of the "
            "ranges. Task heads and gates stay in full precision."
        )
    _refuse_tied(root, {path: linears[path] for path in ranges})
    made: dict[nn.Module, nn.Module] = {}
    for path, ends in ranges.items():
        linear = linears[path]
        _check(path, linear, ends or (0.0, 0.0))
        made[linear] = Int8Linear.rounded(linear.weight, linear.bias, ends, symmetric=symmetric)
    replace(root, made)
    describe(root, symmetric=symmetric, dynamic=None in ranges.values())


def check_linears(root: Any) -> None:
    """Refuse a model that cannot be rounded as a whole.

    Raises:
        ValueError: it has no Linear, rounded weights, adapters, Conv1D, or experts that are no Linears.
    """
    _linears(root)


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
    refuse_stacked(root)
    chosen = dict(quantizable(root))
    if any(type(module).__name__ == "Conv1D" for module in chosen.values()):
        raise ValueError(
            f"{type(root).__name__} has Conv1D, which checkpoints of 8-bit integers do not know; fake_w8a8 shows what "
            "8 bits cost."
        )
    by_name = {path: module for path, module in chosen.items() if type(module) is nn.Linear}
    if not by_name:
        raise ValueError(f"{type(root).__name__} has no Linear outside its head; there is nothing to round.")
    return by_name


def _check(path: str, linear: nn.Linear, ends: Range) -> None:
    """Refuse a Linear that cannot be replaced without a loss that nobody sees.

    Raises:
        ValueError: says which and why.
    """
    low, high = ends
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
