"""Folds a calibration into the weights of a model that is exported: no parameter and no time is left of it.

(A_h M_h + b_h) W_o,h = A_h (M_h W_o,h) + b_h W_o,h. The matrix M_h W_o,h replaces the rows W_o,h of the head, and
b_h W_o,h is added to b_o. For a variant that does not use W_o, the gain multiplies W_v and b_v, because A is linear in
V. The merge is exact at strength 1 alone. The method is this package's own; docs/mathematics.md, section Calibration.
Axes: I input width of a projection, H head, D head width, E model width, W width of all heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..families import Site
from ..layer.fitted import HEADS, Fitted
from ..layer.swap import Swap
from ..patch import need_installation
from .target import is_matrix, output_matrix

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def merge_calibration(model: M, /) -> M:
    """Fold every calibration into W_o and b_o, in place; into W_v and b_v for variants that do not use W_o.

    So is every other fit of the heads that is a linear map of each head (`Fitted.linear`). The model's output stays the
    same up to rounding, and the fits are gone. As after a distillation, strength 0 is no longer the original model, and
    config.json says so (`retrained`). Adapters belong to the model from before the merge, or are trained after it.
    docs/mathematics.md, section Calibration.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not patched or not calibrated; a strength is below 1; an adapter sits on the matrix; a
            map has a bias but W_o has none; a variant that does not use W_o has fewer value heads than query heads; or
            a fit of the heads is no linear map. The model is unchanged after an error.
    """
    installation = need_installation(model)
    merges = [
        _Merge(layer.site, swap, fit, *fit.linear())
        for layer in installation.layers()
        for swap in layer.copies
        for fit in reversed(swap.fitted.values())  # the last fit meets W_o first
        if fit.place == HEADS
    ]
    if not merges:
        raise ValueError("no layer is calibrated; call calibrate on the model first.")
    for merge in merges:
        _check(merge)
    for merge in merges:
        if merge.swap.keeps_projection:
            _into_output(_projection(merge.site), merge)
        else:
            _into_values(merge)
        merge.swap.drop(merge.fit.name)
        merge.swap.retrained = True
    installation.refresh()
    return model


@dataclass(frozen=True)
class _Merge:
    """A fit of one layer that is merged: the linear map that it is, as `Fitted.linear` gives it."""

    site: Site
    swap: Swap
    fit: Fitted
    weight: Tensor
    bias: Tensor | None


def _check(merge: _Merge) -> None:
    site, swap, name = merge.site, merge.swap, merge.fit.name
    if swap.strength != 1.0:
        raise ValueError(
            f"{site.path}: a merge is exact at strength 1 alone, this layer is at {swap.strength:g}; "
            "call set_strength(model, 1.0) first."
        )
    if swap.keeps_projection:
        projection = _projection(site)
        if merge.bias is not None and getattr(projection, "bias", None) is None:
            raise ValueError(
                f"{site.path}: W_o has no bias to take the map's bias; keep the {name} unmerged, or calibrate "
                "with fit='gain'."
            )
        return
    if merge.bias is not None or merge.weight.dim() != 1:
        raise ValueError(
            f"{site.path}: without W_o nothing can take a map's bias; keep the {name} unmerged, or calibrate with "
            "fit='gain'."
        )
    if swap.geometry.kv_heads != swap.geometry.heads:
        raise ValueError(
            f"{site.path}: W_v serves groups of heads, and every head has its own gain; keep the {name} unmerged."
        )
    _values(site, swap.geometry.heads * swap.geometry.head_dim)


def _projection(site: Site) -> nn.Module:
    if site.family.output is None:
        raise ValueError(
            f"{site.path}: the package does not know which module holds W_o, so nothing can be merged; keep the "
            "calibration unmerged."
        )
    return _matrix(site, site.container.get_submodule(site.family.output))


def _matrix(site: Site, module: nn.Module) -> nn.Module:
    if not isinstance(module, (nn.Linear, Conv1D)) or hasattr(module, "base_layer"):
        raise ValueError(
            f"{site.path}: {type(module).__name__} is no plain matrix (an adapter or quantised weights); merge into "
            "the model without adapters and without quantisation, or keep the calibration unmerged."
        )
    if not is_matrix(module):
        raise ValueError(
            f"{site.path}: the weight of {type(module).__name__} is not here as a matrix (offloaded or "
            "quantised weights); load the model without offloading and without quantisation to merge, or keep the "
            "calibration unmerged."
        )
    return module


def _into_output(projection: nn.Module, merge: _Merge) -> None:
    weight_IE, bias_E = output_matrix(projection)
    fitted = _wide(merge.weight)
    wide_HDE = _wide(weight_IE).reshape(len(fitted), -1, weight_IE.shape[1])
    if merge.bias is not None:
        assert bias_E is not None
        _put(bias_E, _wide(bias_E) + torch.einsum("hd,hde->e", _wide(merge.bias), wide_HDE))
    # The weight comes last: for an fp64 weight on the CPU `wide_HDE` is a view of it.
    merged_HDE = wide_HDE * fitted[:, None, None] if fitted.dim() == 1 else fitted @ wide_HDE
    _put(weight_IE, merged_HDE.flatten(0, 1))


def _into_values(merge: _Merge) -> None:
    gain_W = _wide(merge.weight).repeat_interleave(merge.swap.geometry.head_dim)
    weight_IW, bias_W = _values(merge.site, gain_W.shape[0])
    _put(weight_IW, _wide(weight_IW) * gain_W)
    if bias_W is not None:
        _put(bias_W, _wide(bias_W) * gain_W)


def _wide(parameter: Tensor) -> Tensor:
    """Return the numbers in fp64, on the CPU: some devices (Apple's) have no fp64."""
    return parameter.detach().cpu().double()


def _put(parameter: Tensor, values: Tensor) -> None:
    """Write new values into a parameter. The values are rounded to its dtype on the CPU, where fp64 exists."""
    parameter.copy_(values.to(parameter.dtype))


def _values(site: Site, width: int) -> tuple[Tensor, Tensor | None]:
    """Return W_v (I,W) and b_v (W,) as views of the parameters: their last W columns if one matrix holds Q, K and V."""
    family = site.family
    if family.value is None:
        raise ValueError(
            f"{site.path}: the package does not know which module is the value projection; keep the "
            "calibration unmerged."
        )
    module = _matrix(site, site.core.get_submodule(family.value))
    weight, bias = output_matrix(module)
    if family.value == family.query and not isinstance(module, Conv1D):
        raise ValueError(
            f"{site.path}: one matrix holds Q, K and V in an order that the package does not know; keep the "
            "calibration unmerged."
        )
    return weight[:, -width:], None if bias is None else bias[-width:]
