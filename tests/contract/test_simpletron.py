"""What the SimpleTRON paper says of its layer, as tests: a cubic form, the factor of the length, and no W_o."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BertConfig
from transformers.models.bert.modeling_bert import BertLayer

from hf_attn_swap import patch_model
from hf_attn_swap.functional import simple_attention
from tests import zoo

from .harness import fresh

WIDTH = 6


def head(attention: Callable[..., Tensor], biases: float) -> Callable[[Tensor], Tensor]:
    """One head on tokens X (L,E), with the paper's Q*, K*, V* and biases of this size."""
    generator = torch.Generator().manual_seed(0)
    maps = torch.randn(3, WIDTH, WIDTH, generator=generator, dtype=torch.float64)
    added = biases * torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)
    return lambda x: attention(*((x @ weight + bias)[None, None] for weight, bias in zip(maps, added, strict=True)))


def drawn(seed: int, length: int = 5) -> Tensor:
    return torch.randn(length, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def differences(function: Callable[[Tensor], Tensor], order: int) -> Tensor:
    """The finite differences of this order along a line of inputs; those of a polynomial of lower degree are 0."""
    start, way = drawn(1), drawn(2)
    values = torch.stack([function(start + step * way) for step in range(order + 1)])
    for _ in range(order):
        values = values.diff(dim=0)
    return values


def test_the_layer_is_a_polynomial_of_degree_three() -> None:
    """Section 3: a quadratic form multiplied by the input again, so it is not linear in X."""
    with_biases, without = head(simple_attention, 1.0), head(simple_attention, 0.0)
    assert float(differences(with_biases, 4).abs().max()) < 1e-9
    assert float(differences(with_biases, 3).abs().max()) > 1
    torch.testing.assert_close(without(3 * drawn(1)), 27 * without(drawn(1)))
    ordinary = head(torch.nn.functional.scaled_dot_product_attention, 1.0)
    assert float(differences(ordinary, 4).abs().max()) > 1


def test_the_factor_keeps_the_deviation_at_every_length() -> None:
    """Section 4: 1 / sqrt(L) makes the training stable. The deviation of independent tokens then has no length."""
    deviation = {}
    for length in (64, 4096):
        qkv = torch.randn(3, 8, 4, length, 16, generator=torch.Generator().manual_seed(length))
        deviation[length] = float(simple_attention(*qkv).std())
        deviation[-length] = float(simple_attention(*qkv).std() * length**0.5)
    assert deviation[64] == pytest.approx(deviation[4096], rel=0.05)
    assert deviation[-4096] / deviation[-64] == pytest.approx(8, rel=0.05), "without the factor"


@pytest.mark.parametrize(
    ("variant", "options", "reads_it", "skip"),
    [
        ("simpletron", {}, False, 0.0),
        ("simpletron_res", {}, False, 1.0),
        ("simpletron_res", {"skip": "block"}, False, 0.0),
        ("simpletron_resl", {}, True, 1.0),
        ("simpletron_resl", {"skip": "block"}, True, 0.0),
    ],
)
def test_the_settings_of_figure_3(variant: str, options: dict[str, Any], reads_it: bool, skip: float) -> None:
    """With values of 0 a layer gives its skip and b_o alone; W_o has a gradient where the layer reads it."""
    model = patch_model(fresh("gpt2"), variant, **options)
    attention = model.transformer.h[0].attn
    width = attention.embed_dim
    with torch.no_grad():
        attention.c_attn.weight[:, 2 * width :] = 0
        attention.c_attn.bias[2 * width :] = 0
    seen: list[tuple[Tensor, Tensor]] = []
    attention.register_forward_hook(lambda module, args, out: seen.append((args[0], out[0])))
    model(**zoo.inputs("gpt2", batch=2, length=5)).logits.sum().backward()
    (given, got) = seen[0]
    torch.testing.assert_close(got, skip * given + (attention.c_proj.bias if reads_it else 0))
    later = model.transformer.h[1].attn.c_proj.weight.grad
    assert (later is not None and bool(later.any())) is reads_it


def test_the_share_of_frozen_weights() -> None:
    """Section 4 says "about 30 %" for frozen q, k and v; of a block of the matching task they are 25 to 27 %."""
    layer = BertLayer(BertConfig(hidden_size=128, intermediate_size=512, num_attention_heads=4))
    count = {name: parameter.numel() for name, parameter in layer.named_parameters()}
    frozen = sum(size for name, size in count.items() if ".self." in name)
    projection = sum(size for name, size in count.items() if "attention.output.dense" in name)
    assert frozen / sum(count.values()) == pytest.approx(0.25, abs=0.002)
    assert frozen / (sum(count.values()) - projection) == pytest.approx(0.272, abs=0.002)
