"""The slow oracle against what it does not share code with: stock models, the entmax package, values worked by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import slow, zoo
from tests.contract.harness import assert_same, batch_of, fresh, run
from tests.reference import reference_model

LN2, LN3 = math.log(2), math.log(3)
PADDED = [(family, side) for family in zoo.FAMILIES for side in (None, "left", "right") if family != "vit" or not side]
PARAMETERS = {"gated": {"gated.gate.weight": (4, 8), "gated.gate.bias": (4,)}, "belief_star": {}}
PARAMETERS["belief_star"]["belief_star.w_s.weight"] = (32, 32)
AT_ZERO = (
    "outeffhop",
    "clipped_softmax",
    "gated",
    "sparsemax",
    "entmax15",
    "simpletron",
    "simpletron_res",
    "simpletron_resl",
    "belief",
)
AT_ZERO += (
    "belief_star",
    "modern_hopfield",
    "modern_hopfield+outeffhop+clipped_softmax+gated",
    "modern_hopfield+entmax15+belief",
    "outeffhop+belief_star",
)


def tensor(*values: Any, grad: bool = False) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def close(got: Tensor, wanted: Tensor, tolerance: float = 1e-12) -> None:
    assert got.shape == wanted.shape
    got, wanted = got.detach(), wanted.detach()
    assert float((got - wanted).abs().max()) <= tolerance * max(1.0, float(wanted.abs().max()))


def parameters_of(variant: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    shapes = {key: shape for name in variant.split("+") for key, shape in PARAMETERS.get(name, {}).items()}
    return [{k: torch.randn(s, generator=generator, dtype=torch.float64) for k, s in shapes.items()} for _ in range(3)]


@pytest.mark.parametrize(("family", "padded"), PADDED)
def test_softmax_is_the_stock_model(family: str, padded: str | None) -> None:
    """Against SDPA: eager attention rounds its weights to fp32 in OPT, LLaMA and ViT, whatever the model's dtype."""
    batch = batch_of(family, padded=padded)
    assert_same(run(reference_model(fresh(family), "softmax", layers={0, 2}), batch), run(fresh(family), batch))


@pytest.mark.parametrize(("family", "variant"), list(zip(itertools.cycle(["bert", "llama"]), AT_ZERO)))
def test_strength_zero_is_the_stock_model(family: str, variant: str) -> None:
    batch = batch_of(family, padded="left")
    slow_model = reference_model(fresh(family), variant, strength=0.0, parameters=parameters_of(variant))
    assert_same(run(slow_model, batch), run(fresh(family), batch))


def test_the_carry_starts_from_zero() -> None:
    """H_1 = (1 - alpha') S_1: the model whose queries of that layer are smaller by 1 - alpha'."""
    model, halved, batch = fresh("bert"), fresh("bert"), batch_of("bert", padded="right")
    with torch.no_grad():
        for parameter in halved.bert.encoder.layer[1].attention.self.query.parameters():
            parameter.mul_(0.25)
    options = {"alpha": 0.0, "alpha_prime": 0.75}
    close(run(reference_model(model, "modern_hopfield", options=options, layers={1}), batch)[0], run(halved, batch)[0])
    first = reference_model(model, "modern_hopfield", options=options | {"init": "first"}, layers={1})
    close(run(first, batch)[0], run(fresh("bert"), batch)[0])


def test_the_skip_rescales_a_post_norm_layer() -> None:
    """In a post-norm layer alpha scales W_o and b_o by (1 - alpha) / (1 + alpha); exact if the norm has no epsilon."""
    model, scaled = (fresh("bert", layer_norm_eps=0.0) for _ in range(2))
    batch = batch_of("bert")
    with torch.no_grad():
        for layer in scaled.bert.encoder.layer:
            for parameter in layer.attention.output.dense.parameters():
                parameter.mul_((1 - 0.5) / (1 + 0.5))
    close(run(reference_model(model, "modern_hopfield", options={"alpha_prime": 0.0}), batch)[0], run(scaled, batch)[0])


def test_a_gate_at_its_start_is_open() -> None:
    start = {"gated.gate.weight": torch.zeros(4, 8, dtype=torch.float64), "gated.gate.bias": tensor(*[-LN3] * 4)}
    batch = batch_of("gpt2")
    assert_same(run(reference_model(fresh("gpt2"), "gated", parameters=[start] * 3), batch), run(fresh("gpt2"), batch))


def test_softmax_n_by_hand() -> None:
    close(slow.slow_softmax_n(tensor(0, LN2), 0.0), tensor(1 / 3, 2 / 3))
    close(slow.slow_softmax_n(tensor(0, LN2), 1.0), tensor(1 / 4, 2 / 4))
    close(slow.slow_softmax_n(tensor(0, LN2), 0.5), tensor(2 / 7, 4 / 7))
    close(slow.slow_softmax_n(tensor(-800, 800), 1.0), tensor(0, 1))
    close(slow.slow_softmax_n(tensor(0, LN2), 1.0, torch.tensor([False, True])), tensor(0, 2 / 3))
    far = tensor(-1000, -1001, grad=True)
    slow.slow_softmax_n(far, 1.0).sum().backward()
    close(far.grad, tensor(0, 0))
    hidden = slow.slow_softmax_n(tensor(0, LN2), 1.0, torch.tensor([False, False]))
    close(hidden, tensor(0, 0))


def test_clipped_softmax_by_hand() -> None:
    scores = tensor(0, LN3)  # p = 1/4, 3/4
    close(slow.slow_clipped_softmax(scores, -0.5, 1.0), tensor(0, 0.625))
    close(slow.slow_clipped_softmax(scores, 0.0, 1.6), tensor(0.4, 1))
    close(slow.slow_clipped_softmax(scores, -0.1, 1.1, n=1.0), tensor(0.14, 0.62))  # p = 1/5, 3/5
    close(slow.slow_clipped_softmax(scores, -0.1, 1.0, allowed=torch.tensor([True, False])), tensor(1, 0))


def test_sparse_normalizers_by_hand() -> None:
    close(slow.slow_sparsemax(tensor(1, 0.5)), tensor(0.75, 0.25))
    close(slow.slow_sparsemax(tensor(2, 0, 1)), tensor(1, 0, 0))
    close(slow.slow_entmax15(tensor(1.2, 1.6)), tensor(0.36, 0.64))  # tau = 0
    close(slow.slow_entmax15(tensor(5, 0)), tensor(1, 0))


def test_simple_attention_by_hand() -> None:
    q, k, v = tensor([1, 0], [0, 1]), tensor([1, 3], [2, 4]), tensor([1, 0], [0, 1])
    q, k, v = (t[None, None] for t in (q, k, v))
    root = math.sqrt(2)
    close(slow.slow_simple_attention(q, k, v)[0, 0], tensor([1 / root, 2 / root], [3 / root, 4 / root]))
    close(slow.slow_simple_attention(q, k, v, causal=True)[0, 0], tensor([1, 0], [3 / root, 4 / root]))
    seen = torch.tensor([[False, True]])
    close(slow.slow_simple_attention(q, k, v, key_mask=seen)[0, 0], tensor([0, 2], [0, 4]))
    close(
        slow.slow_simple_attention(q, k, v, key_mask=seen, length="fixed")[0, 0], tensor([0, 2 / root], [0, 4 / root])
    )
    close(slow.slow_simple_attention(q, k, v, causal=True, key_mask=seen)[0, 0], tensor([0, 0], [0, 4]))
    close(slow.slow_simple_attention(q[:, :, 1:], k, v, causal=True)[0, 0], tensor([3 / root, 4 / root]).view(1, 2))


def test_belief_projection_by_hand() -> None:
    heads, values = tensor([[3, 4], [1, 2]])[None], tensor([[1, 0], [0, 2]])[None]  # one token, two heads of width 2
    close(slow.slow_belief_projection(heads, values, per_head=True)[0, 0], tensor([0, 4], [1, 0]))
    close(slow.slow_belief_projection(heads, values)[0, 0], tensor([1.6, 4], [1, -0.8]))  # 7 / 5 of v
    close(slow.slow_belief_projection(heads, 0 * values), heads)
    close(slow.slow_belief_projection(values, values), 0 * values)


def test_hopfield_by_hand() -> None:
    below, here = tensor(4, 8), tensor(2, 0)
    close(slow.slow_hopfield_scores([here], 0.25), tensor(1.5, 0))
    close(slow.slow_hopfield_scores([below, here], 0.25), tensor(0.75 + 1.5, 1.5))
    state, patterns = tensor(1, 0), torch.eye(2, dtype=torch.float64)
    close(slow.slow_hopfield_retrieve(state, patterns, LN2), tensor(2 / 4, 1 / 4))
    close(slow.slow_hopfield_retrieve(state, patterns, LN2, n=0.0), tensor(2 / 3, 1 / 3))
    powers = tensor(2**0.5, 2**0.25)
    close(slow.slow_hopfield_retrieve(state, patterns, LN2, steps=2), powers / (1 + powers.sum()))
