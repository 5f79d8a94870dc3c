"""Kernels on other devices than the CPU: where they make their tensors, and a device map that cuts a model in two.

The meta device stands for a GPU. It computes shapes, not numbers, and refuses to mix with the CPU as a second GPU does.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_attn_swap.core.call import Call, ForwardContext, Hidden, Inputs
from hf_attn_swap.core.masks import Masks
from hf_attn_swap.kernels import carried, hopfield, weighted
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


class OnTheCpu(TorchDispatchMode):
    """Notes the operators that make a tensor on the CPU: a GPU would have to wait for the copy of it."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.made += [str(func) for tensor in tensors if tensor.device.type == "cpu"]
        return result


@pytest.mark.parametrize("rule", ["softmax", "softmax_n"])
def test_blocks_of_weights_make_their_tensors_where_the_scores_are(rule: str) -> None:
    q, k, v = made("meta", 0).three
    with OnTheCpu() as noted:
        how = (None, None, None, True, 0.5, rule, 1.0, -0.1, 1.0, 0.0)
        heads, rows = weighted.compute(q, k, v, *how)
        weighted.compute_backward(heads, rows, q, k, v, *how)
    assert not noted.made


def test_a_mask_with_further_keys_is_made_where_the_queries_are() -> None:
    masks = made("meta", 0).masks
    with OnTheCpu() as noted:
        wider = masks.with_extra_keys(2, None, torch.float32)
    assert wider.key_mask is not None
    assert wider.key_mask.shape == (1, LENGTH + 2)
    assert not noted.made


@pytest.mark.parametrize(("device", "blocks"), [("cpu", LENGTH), ("meta", 1)])
def test_blocks_of_carried_scores_are_larger_on_a_gpu(
    device: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hopfield, "BLOCK", 1)
    calls: list[int] = []
    block = hopfield._block
    monkeypatch.setattr(hopfield, "_block", lambda *given: calls.append(1) or block(*given))
    inputs = made(device, 0)
    key, value = inputs.repeated(inputs.key), inputs.repeated(inputs.value)
    hopfield.attend_long([(inputs.query, key, 0.5)], value, None, True)
    assert len(calls) == blocks
