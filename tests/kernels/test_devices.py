"""A device map that cuts a model between layers: the carried terms of lower layers come to where the layer computes.

The meta device stands for the second device. It computes shapes, not numbers, and refuses to mix with the CPU as a
second GPU does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_attn_swap.core.call import Call, ForwardContext, Hidden, Inputs
from hf_attn_swap.core.masks import Masks
from hf_attn_swap.kernels import carried
from hf_attn_swap.kernels.dispatch import Form

LENGTH = 6


def made(device: str, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, heads, LENGTH, 4, generator=generator).to(device) for heads in (4, 2, 2))
    masks = Masks(queries=LENGTH, keys=LENGTH, device=query.device, causal=True)
    return Inputs(query=query, key=key, value=value, scaling=0.5, masks=masks, dropout=0.0)


def layer(inputs: Inputs, shared: ForwardContext, order: int, below: Hidden | None) -> Tensor:
    call = Call(x=inputs.query, context=shared, order=order)

    def never(*args: Any) -> Tensor:
        raise AssertionError("long sequences have no fused form")

    heads = carried.attend(Form.TERMS, inputs, call, never, below, 0.5, 0.5)
    assert heads is not None
    return heads


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("devices", [("cpu", "meta"), ("meta", "meta", "cpu"), ("cpu", "meta", "meta")])
def test_terms_follow(devices: tuple[str, ...], gradients: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if "cpu" in devices[devices.index("meta") :]:  # numbers cannot leave the meta device: zeros come in their place
        to = Tensor.to

        def brought(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            back = tensor.is_meta and args and args[0] == torch.device("cpu")
            return torch.zeros_like(tensor, device="cpu") if back else to(tensor, *args, **kwargs)

        monkeypatch.setattr(Tensor, "to", brought)
    shared = ForwardContext()
    with torch.set_grad_enabled(gradients):
        for order, device in enumerate(devices):
            below = shared.scores.get(order - 1)
            moved = None if below is None else len(below.terms)
            heads = layer(made(device, order), shared, order, below)
            assert heads.device.type == device
            terms = shared.scores[order].terms
            assert len(terms) == (moved or 0) + 1
            assert {part.device.type for q, k, _ in terms for part in (q, k)} == {device}


def test_on_one_device_terms_are_not_copied() -> None:
    shared = ForwardContext()
    with torch.no_grad():
        layer(made("cpu", 0), shared, 0, None)
        below = shared.scores[0]
        layer(made("cpu", 1), shared, 1, below)
    assert all(
        new[0] is old[0] and new[1] is old[1] for old, new in zip(below.terms, shared.scores[1].terms, strict=False)
    )
