"""What docs/mathematics.md says of a paper's formula, on real weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hf_attn_swap import patch_model

from .checkpoints import fresh, inputs, needs, run


@pytest.mark.parametrize("name", [needs("minilm")])
def test_the_inequality_of_beliefformer_is_false_for_some_tokens(name: str) -> None:
    """|Delta W_o| <= |MH W_o| (after eq. 12): the norms of W_o's output with and without the projection, per token."""
    batch = inputs(name)
    mask = batch["attention_mask"].bool()
    model = fresh(name)
    layers = model.encoder.layer
    states: list[Tensor] = []
    handles = [layer.attention.register_forward_pre_hook(lambda _, args: states.append(args[0])) for layer in layers]
    run(model, batch)  # every layer reads what it reads in the stock model
    for handle in handles:
        handle.remove()
    patch_model(model, "belief")
    shares = []
    for layer, x in zip(layers, states, strict=True):
        added = [_added(layer.attention, x, mask, stock) for stock in (True, False)]
        longer = added[1].norm(dim=-1) > added[0].norm(dim=-1)
        shares.append(float(longer[mask].float().mean()))
    assert all(0 < share < 0.5 for share in shares), shares


def _added(attention: nn.Module, x: Tensor, mask: Tensor, stock: bool) -> Tensor:
    """What W_o gives without its bias, (B,L,E), for the stock heads or for those of the variant."""
    seen: list[Tensor] = []
    dense = attention.output.dense
    with torch.no_grad():
        handle = dense.register_forward_hook(lambda module, args, out: seen.append(out - module.bias))
        keys = mask[:, None, None].expand(-1, -1, x.shape[1], -1)
        attention.self.attn_swap.compute_at(0.0 if stock else 1.0)
        attention(x, attention_mask=keys)
        handle.remove()
    return seen[0]
