"""Warns when an adapter of PEFT is saved, and the base model that it names does not have the swap.

PEFT saves an adapter alone: its weights, and the name of the base model. It offers no place where the swap of a model
that was patched in memory could be kept, so the adapter would load on stock attention.
"""

from __future__ import annotations

import inspect
import os
import warnings
from types import FrameType
from typing import Any

from transformers import PreTrainedModel

from ..layer.swap import Swap

WRAPPERS = {"base_model.model.": "model.unload()", "base_model.": "model.get_base_model()"}


def before_state_dict(root: Any, prefix: str, keep_vars: bool) -> None:
    """Before the weights of a patched model are read: warn if a wrapper of PEFT reads them to save an adapter.

    PEFT calls nothing of the model inside when it saves, except that it reads the weights. It also reads them when it
    loads an adapter, so the method that runs decides. The wrapper of an adapter on matrices has the base model two
    steps inside; the wrapper of a prompt, one step.
    """
    base = next((line for wrapper, line in WRAPPERS.items() if prefix.endswith(wrapper)), None)
    if base is not None and _saves(inspect.currentframe()):
        warn_alone(root, f'{base}.save_pretrained("converted")')


def _saves(frame: FrameType | None) -> bool:
    """True if a method `save_pretrained` runs."""
    while frame is not None:
        if frame.f_code.co_name == "save_pretrained":
            return True
        frame = frame.f_back
    return False


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
    said = [each.base_model_name_or_path for each in getattr(root, "peft_config", {}).values()]
    return next(filter(None, said), None) or root.name_or_path or ""
