"""LoRA adapters of PEFT on the attention projections of any family: their targets, and an effect on one projection."""

from __future__ import annotations

from typing import Any

import peft
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.families import FAMILIES
from tests.contract.harness import fresh, perturb

BY_NAME = {family.name: family for family in FAMILIES.values()}


def projections(name: str) -> dict[str, str]:
    """By role, the last part of the path of each projection."""
    family = BY_NAME[name]
    paths = {role: getattr(family, role) for role in ("query", "key", "value", "output")}
    return {role: path for role, path in paths.items() if path is not None}


def lora(name: str, **kwargs: Any) -> peft.LoraConfig:
    """Adapters on the attention projections alone: W_o of BERT is called like a matrix of its feed-forward."""
    ends = "|".join(sorted({path.replace(".", r"\.") for path in projections(name).values()}))
    inside = r"(attention|attention\.self|attn|self_attn)"
    fan = {"fan_in_fan_out": True} if name == "gpt2" else {}
    return peft.LoraConfig(r=2, lora_alpha=4, target_modules=rf".*\.{inside}\.({ends})", **fan, **kwargs)


def adapted(name: str, variant: str, before: bool, strength: float = 1.0, **kwargs: Any) -> Any:
    """A model with adapters that were put on before or after the swap."""
    model = fresh(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if before:
            return patch_model(peft.get_peft_model(model, lora(name, **kwargs)), variant, strength=strength).eval()
        return peft.get_peft_model(perturb(patch_model(model, variant, strength=strength)), lora(name, **kwargs)).eval()


def fill(model: Any, ending: str, size: float = 1.0) -> None:
    """Give the adapters of one projection an effect, or none (size 0)."""
    generator = torch.Generator().manual_seed(4)
    touched = 0
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key and f".{ending}.lora_B" in key:
                noise = size * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise.to(parameter.dtype))
                touched += 1
    assert touched
