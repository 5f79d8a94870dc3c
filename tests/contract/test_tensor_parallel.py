"""Tensor parallelism gives each process a part of the heads; a swap is built for all of them, and says so."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hf_attn_swap import patch_model

from .harness import batch_of, forward, fresh, refused


@pytest.mark.parametrize("variant", ["belief", "simpletron_resl"])
def test_refused_when_patched(variant: str) -> None:
    model = fresh("llama")
    model._tp_size = 2  # as `from_pretrained(tp_plan="auto")` leaves it
    with refused("tensor parallelism", "2 processes", "part of the heads", "device_map"):
        patch_model(model, variant)
    model._tp_size = 1  # one process has all heads
    patch_model(model, variant)


@pytest.mark.parametrize("variant", ["belief", "simpletron_resl"])
def test_refused_when_split_afterwards(variant: str) -> None:
    model = patch_model(fresh("llama"), variant)
    for layer in model.model.layers:  # what the first of two processes holds, by the model's own plan
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            whole = getattr(attention, name)
            whole.weight = nn.Parameter(whole.weight[: len(whole.weight) // 2])
        attention.o_proj.weight = nn.Parameter(attention.o_proj.weight[:, : attention.o_proj.weight.shape[1] // 2])
    with torch.no_grad(), refused("4 heads of 8", "2 of 8", "tensor parallelism", "part of the heads"):
        forward(model, batch_of("llama"))
