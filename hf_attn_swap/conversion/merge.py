"""Fold a calibration into the weights: no parameter and no work is left, and no way back.

(A_h M_h + b_h) W_o = A_h (M_h W_o,h) + b_h W_o,h: into W_o's rows of the head and into b_o. A variant without W_o
takes a gain in W_v and b_v instead: A is linear in V. Exact at strength 1 alone. Ours (no paper); docs/mathematics.md,
section Calibration and transfer.
Axes: H head, D head width, E model width.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from ..core.calibration import Calibration
from ..core.swap import Swap
from ..families import Site
from ..patch import need_installation, swappable
from .target import is_matrix, output_matrix

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def merge_calibration(model: M, /) -> M:
    """Fold every calibration into W_o and b_o (W_v and b_v where there is no W_o), in place.

    The model computes the same to rounding. From then on its strength stays 1, it cannot be unpatched, and an adapter
    on a merged matrix is refused; config.json records it.

    Returns:
        The same model.

    Raises:
        ValueError: the model is not patched or not calibrated, a strength below 1, an adapter on the matrix, a map's
            bias where the layer has none to take it, or grouped value heads under a variant without W_o. The model
            is unchanged then.
    """
    installation = need_installation(model)
    usable = swappable(installation.root)
    found = [(usable[index], swap) for index, swaps in installation.swaps().items() for swap in swaps]
    calibrated = [(site, swap, swap.calibration) for site, swap in found if swap.calibration is not None]
    if not calibrated:
        raise ValueError("no layer is calibrated; call calibrate on the model first.")
    for site, swap, calibration in calibrated:
        _check(site, swap, calibration)
    for site, swap, calibration in calibrated:
        if swap.keeps_projection:
            _into_output(_projection(site), calibration)
        else:
            _into_values(site, calibration)
        swap.merged, swap.calibration = calibration.fit, None
    installation.refresh()
    return model


def _check(site: Site, swap: Swap, calibration: Calibration) -> None:
    if swap.strength != 1.0:
        raise ValueError(f"{site.path}: a merge is exact at strength 1 alone, this layer is at {swap.strength:g}.")
    if swap.keeps_projection:
        projection = _projection(site)
        if calibration.fit == "map" and getattr(projection, "bias", None) is None:
            raise ValueError(
                f"{site.path}: W_o has no bias to take the map's; keep the calibration as it is, or use fit='gain'."
            )
        return
    if calibration.fit == "map":
        raise ValueError(f"{site.path}: without W_o nothing can take a map's bias; keep it, or use fit='gain'.")
    if swap.geometry.kv_heads != swap.geometry.heads:
        raise ValueError(f"{site.path}: W_v serves groups of heads, which have one gain each; keep the calibration.")
    _values(site, swap.geometry.heads * swap.geometry.head_dim)


def _projection(site: Site) -> nn.Module:
    if site.family.output is None:
        raise ValueError(f"{site.path}: W_o is in a module that we do not know, so nothing can be merged into it.")
    return _plain(site, site.container.get_submodule(site.family.output))


def _plain(site: Site, module: nn.Module) -> nn.Module:
    if not isinstance(module, (nn.Linear, Conv1D)) or hasattr(module, "base_layer"):
        raise ValueError(f"{site.path}: {type(module).__name__} is no plain matrix (adapter? quantised?).")
    if not is_matrix(module):
        raise ValueError(
            f"{site.path}: the weight of {type(module).__name__} is not here as a matrix (offloaded? quantised?); load "
            "the whole model without offloading or quantisation to merge, or keep the calibration as it is."
        )
    return module


def _into_output(projection: nn.Module, calibration: Calibration) -> None:
    weight_IE, bias_E = output_matrix(projection)
    heads = calibration.weight.shape[0]
    wide_HDE = _wide(weight_IE).reshape(heads, -1, weight_IE.shape[1])
    fitted = _wide(calibration.weight)
    if calibration.fit == "gain":
        _put(weight_IE, (wide_HDE * fitted[:, None, None]).flatten(0, 1))
        return
    assert bias_E is not None
    _put(bias_E, _wide(bias_E) + torch.einsum("hd,hde->e", _wide(calibration.bias), wide_HDE))
    _put(weight_IE, (fitted @ wide_HDE).flatten(0, 1))  # last: in fp64 `wide_HDE` is the weight itself


def _into_values(site: Site, calibration: Calibration) -> None:
    gain_W = _wide(calibration.weight).repeat_interleave(site.family.geometry(site.core).head_dim)
    weight_IW, bias_W = _values(site, gain_W.shape[0])
    _put(weight_IW, _wide(weight_IW) * gain_W)
    if bias_W is not None:
        _put(bias_W, _wide(bias_W) * gain_W)


def _wide(parameter: Tensor) -> Tensor:
    """The numbers in fp64, on the CPU: some devices (Apple's) have no fp64."""
    return parameter.detach().cpu().double()


def _put(parameter: Tensor, values: Tensor) -> None:
    """New values, rounded before they leave the CPU."""
    parameter.copy_(values.to(parameter.dtype))


def _values(site: Site, width: int) -> tuple[Tensor, Tensor | None]:
    """W_v as (in, out) and b_v: views of the parameters, the last third where one matrix holds Q, K and V."""
    family = site.family
    if family.value is None:
        raise ValueError(f"{site.path}: the value projection is under no name that we know; keep the calibration.")
    module = _plain(site, site.core.get_submodule(family.value))
    weight, bias = output_matrix(module)
    if family.value == family.query and not isinstance(module, Conv1D):
        raise ValueError(f"{site.path}: Q, K and V share a matrix whose order we do not know; keep the calibration.")
    return weight[:, -width:], None if bias is None else bias[-width:]
