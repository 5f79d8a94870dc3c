"""Weights of stock models: made uneven, and compared bit for bit."""

from __future__ import annotations

from typing import Any

import torch


def uneven(model: Any, seed: int = 5) -> Any:
    """The same model with norms whose channels differ much, and without biases of 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_((parameter.double() + 0.1) * torch.exp2(1.5 * noise))
    return model


def bits(model: Any) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items() if ".attn_swap." not in key}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())
