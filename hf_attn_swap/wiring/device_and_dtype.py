"""Finds the device on which an attention module computes, and the dtype in which it computes.

The weights do not always tell both. accelerate keeps offloaded weights on the meta device until their module is
called. Weights that are quantised to 4 bits are stored as bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core.call import DeviceAndDtype


def device_and_dtype(container: nn.Module, core: nn.Module) -> DeviceAndDtype:
    """The device on which an attention module computes, and the dtype in which it computes.

    Args:
        container: the module that holds the weights.
        core: the module with the config. The config states the dtype if no weight is a floating point number.
    """
    parameters = list(container.parameters())
    floating = next((parameter for parameter in parameters if parameter.is_floating_point()), None)
    like = floating if floating is not None else next(iter(parameters), None)
    device = torch.device("cpu") if like is None else like.device
    if any(parameter.is_meta for parameter in parameters):  # offloaded, or built without weights, perhaps in part
        device = _execution_device(container) or torch.device("meta")
    dtype = _compute_dtype(container, core) if floating is None else floating.dtype
    return DeviceAndDtype(device, dtype)


def _execution_device(container: nn.Module) -> torch.device | None:
    """The device to which accelerate brings the weights when their module is called; None without such a hook."""
    for module in container.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for inner_hook in getattr(hook, "hooks", (hook,)):
            device = getattr(inner_hook, "execution_device", None)
            if device is not None:
                return torch.device(device)
    return None


def _compute_dtype(container: nn.Module, core: nn.Module) -> torch.dtype:
    """The dtype of a module without floating point weights: as its layers state, or else as the config states."""
    said = [getattr(module, "compute_dtype", None) for module in container.modules()]
    said.append(getattr(getattr(core, "config", None), "dtype", None))
    return next((dtype for dtype in said if isinstance(dtype, torch.dtype)), torch.get_default_dtype())
