"""Folds a calibration into the weights of a model that is exported: no parameter and no time is left of it.

(A_h M_h + b_h) W_o,h = A_h (M_h W_o,h) + b_h W_o,h. The matrix M_h W_o,h replaces the rows W_o,h of the head, and
b_h W_o,h is added to b_o. The merge is exact at strength 1 alone. The method is this package's own;
docs/mathematics.md, section Calibration.
Axes: I input width of W_o, H head, D head width, E model width.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..families import Site
from ..layer.fitted import HEADS
from ..layer.swap import Swap
from ..patch import need_installation
from .target import is_matrix, output_matrix

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def merge_calibration(model: M, /) -> M:
    """Fold every calibration into W_o and b_o, in place.

    So is every other fit of the heads that is a linear map of each head (`Fitted.linear`). The model's output stays the
    same up to rounding, and the fits are gone. As after a distillation, strength 0 is no longer the original model, and
    config.json says so (`retrained`). Adapters belong to the model from before the merge, or are trained after it.
    docs/mathematics.md, section Calibration.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not patched or not calibrated; a strength is below 1; a variant drops W_o; an adapter
            sits on W_o; a map has a bias but W_o has none; or a fit of the heads is no linear map. The model is then
            unchanged.
    """
    installation = need_installation(model)
    merges = [
        (layer.site, swap, fit, *fit.linear())
        for layer in installation.layers()
        for swap in layer.copies
        for fit in reversed(swap.fitted.values())  # the last fit meets W_o first
        if fit.place == HEADS
    ]
    if not merges:
        raise ValueError("no layer is calibrated; call calibrate on the model first.")
    projections = [_projection(site, swap, bias is not None) for site, swap, _, _, bias in merges]
    for projection, (_, swap, fit, weight, bias) in zip(projections, merges, strict=True):
        _fold(projection, weight, bias)
        swap.drop(fit.name)
        swap.retrained = True
    installation.refresh()
    return model


def _projection(site: Site, swap: Swap, biased: bool) -> nn.Module:
    """The module of W_o, if a fit can be merged into it.

    Raises:
        ValueError: it cannot be.
    """
    if swap.strength != 1.0:
        raise ValueError(
            f"{site.path}: a merge is exact at strength 1 alone, this layer is at {swap.strength:g}; "
            "call set_strength(model, 1.0) first."
        )
    if site.family.output is None or not swap.keeps_projection:
        raise ValueError(
            f"{site.path}: {'+'.join(swap.names)} drops W_o, or the package does not know which module holds it, so "
            "nothing can be merged; keep the calibration unmerged."
        )
    module = site.container.get_submodule(site.family.output)
    if not isinstance(module, (nn.Linear, Conv1D)) or hasattr(module, "base_layer") or not is_matrix(module):
        raise ValueError(
            f"{site.path}: {type(module).__name__} holds no plain matrix here (an adapter, or offloaded or quantised "
            "weights); load the model without them to merge, or keep the calibration unmerged."
        )
    if biased and getattr(module, "bias", None) is None:
        raise ValueError(
            f"{site.path}: W_o has no bias to take the map's bias; keep the calibration unmerged, or calibrate "
            "with fit='gain'."
        )
    return module


def _fold(projection: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Write M W_o and b_o + b W_o into a projection."""
    weight_IE, bias_E = output_matrix(projection)
    fitted = _wide(weight)
    wide_HDE = _wide(weight_IE).reshape(len(fitted), -1, weight_IE.shape[1])
    if bias is not None:
        assert bias_E is not None
        _put(bias_E, _wide(bias_E) + torch.einsum("hd,hde->e", _wide(bias), wide_HDE))
    # The weight comes last: for an fp64 weight on the CPU `wide_HDE` is a view of it.
    merged_HDE = wide_HDE * fitted[:, None, None] if fitted.dim() == 1 else fitted @ wide_HDE
    _put(weight_IE, merged_HDE.flatten(0, 1))


def _wide(parameter: Tensor) -> Tensor:
    """Return the numbers in fp64, on the CPU: some devices (Apple's) have no fp64."""
    return parameter.detach().cpu().double()


def _put(parameter: Tensor, values: Tensor) -> None:
    """Write new values into a parameter. The values are rounded to its dtype on the CPU, where fp64 exists."""
    parameter.copy_(values.to(parameter.dtype))
