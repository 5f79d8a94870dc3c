"""Warns when an adapter of PEFT is saved, and refuses to load one, if the base model that it names is another model.

PEFT saves an adapter alone: its weights, and the name of the base model. It offers no place where the swap of a model
that was patched in memory could be kept, so the adapter would load on stock attention. And an adapter that was trained
on the base model does not fit a model whose weights were scaled around the swaps: the model is the same function, but
its channels have other sizes.
"""

from __future__ import annotations

import inspect
import os
import warnings
from types import FrameType
from typing import Any

from transformers import PreTrainedModel

from ..layer.fitted import AROUND, FITTED
from ..layer.swap import Swap

WRAPPERS = {"base_model.model.": "model.unload()", "base_model.": "model.get_base_model()"}


def before_state_dict(root: Any, prefix: str, keep_vars: bool) -> None:
    """Before the weights of a patched model are read: is an adapter saved, or loaded?

    PEFT calls nothing of the model inside when it saves or loads an adapter, except that it reads the weights. So the
    method that runs decides. The wrapper of an adapter on matrices has the base model two steps inside; the wrapper of
    a prompt, one step.

    Raises:
        ValueError: an adapter is loaded, and weights were scaled since the base model that it names.
    """
    base = next((line for wrapper, line in WRAPPERS.items() if prefix.endswith(wrapper)), None)
    method = _running(inspect.currentframe())
    if base is not None and method == "save_pretrained":
        warn_alone(root, f'{base}.save_pretrained("converted")')
    if method == "load_adapter":
        _refuse_scaled(root)


def _running(frame: FrameType | None) -> str | None:
    """The innermost method that saves or loads an adapter and runs now; None if there is none."""
    while frame is not None:
        if frame.f_code.co_name in ("save_pretrained", "load_adapter"):
            return frame.f_code.co_name
        frame = frame.f_back
    return None


def _refuse_scaled(root: Any) -> None:
    """Refuse an adapter of a model whose weights had other scales around the swaps.

    Raises:
        ValueError: the weights of this model were scaled, and those of the base model that an adapter names were not.
    """
    scales = _scales(root.config.attn_swap)
    if not any(scales.values()):
        return
    record = root.__dict__["attn_swap_installation"]
    for name, adapter in getattr(root, "peft_config", {}).items():
        base = adapter.base_model_name_or_path or ""
        if _scales(record.bases.get(os.path.normpath(base), {})) != scales:
            raise ValueError(
                f"the adapter {name!r} was trained on {base!r}, but conversion.smooth has scaled the channels of this "
                "model since: both models are the same function, and the adapter would be another one. Load the "
                "adapter on the model from before smooth, call merge_and_unload(), and smooth the result; or save the "
                "smoothed model, load it, and train the adapter on that."
            )


def _scales(block: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """By the number of each layer in a block: the fits that scaled weights around the swap."""
    around = [name for name, fit in FITTED.items() if fit.place == AROUND]
    return {
        layer: {name: entry[name] for name in around if name in entry}
        for entry in block.get("swaps", ())
        for layer in entry["layers"]
    }


def warn_alone(root: PreTrainedModel, save: str) -> None:
    """Warn that an adapter is saved alone, unless the base model that it names was saved with the same swap.

    Args:
        root: the patched model inside the adapters.
        save: the line that saves the patched model without them.
    """
    _warn_of_parameters(root)
    name = name_of_base(root)
    record = root.__dict__["attn_swap_installation"]  # `install.ATTRIBUTE`; `install` imports this file
    if record.bases.get(os.path.normpath(name)) == root.config.attn_swap:
        return
    cls = type(root).__name__
    variants = " and ".join(dict.fromkeys(swap["variant"] for swap in root.config.attn_swap["swaps"]))
    warnings.warn(
        f"an adapter is saved alone, and names {name!r} as its base model, which was not saved with this swap "
        f"({variants}): loaded from there, the adapter runs on other attention than now. Save the swapped model too, "
        f"and load the adapter on it:\n"
        f"    {save}\n"
        f'    model = peft.PeftModel.from_pretrained({cls}.from_pretrained("converted"), "adapter")\n'
        "Or do this before the adapters are put on, so that the adapter names the swapped model:\n"
        '    model.save_pretrained("converted")\n'
        f'    model = {cls}.from_pretrained("converted")',
        stacklevel=2,
    )


def _warn_of_parameters(root: PreTrainedModel) -> None:
    """Warn if the swaps have parameters that the adapter does not hold, and that train, or have never trained."""
    children = [module._modules.get("attn_swap") for module in root.modules()]  # PEFT's wrapper, if it saves the swap
    swaps = [child for child in children if isinstance(child, Swap) and child.new_parameters()]
    names = " and ".join(dict.fromkeys("+".join(swap.names) for swap in swaps))
    if any(parameter.requires_grad for swap in swaps for parameter in swap.new_parameters()):
        warnings.warn(
            f"an adapter is saved without the parameters of {names}, which train beside it: they would be lost. Make "
            'the adapter with modules_to_save=["attn_swap"], or save the swapped model too.',
            stacklevel=2,
        )
    elif swaps and not any(swap.trained for swap in swaps):
        warnings.warn(
            f"the parameters of {names} have not trained, because the adapter froze them. Make the adapter with "
            'modules_to_save=["attn_swap"], so that they train and are saved with it.',
            stacklevel=2,
        )


def name_of_base(root: PreTrainedModel) -> str:
    """The name of the base model that PEFT writes into adapter_config.json."""
    said = [adapter.base_model_name_or_path for adapter in getattr(root, "peft_config", {}).values()]
    return next(filter(None, said), None) or root.name_or_path or ""
