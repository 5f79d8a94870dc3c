"""The recipe's rotation: the same function with a rotated residual stream, whose large channels are spread."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_attn_swap import patch_model
from hf_attn_swap.quantization import fake_w8a8
from tests import zoo
from tests.contract.harness import forward
from tests.conversion.weights import uneven
from tests.harness.recipes import RECIPES, needs_recipes

pytestmark = needs_recipes
sys.path.insert(0, str(RECIPES))
try:
    from rotate import rotate, spreading
finally:
    sys.path.remove(str(RECIPES))

EXACT = 1e-12  # relative, in float64


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])  # with biases, with norms of queries and keys
def test_the_same_function(name: str, tmp_path: Path) -> None:
    model: Any = uneven(zoo.build(name, dtype=torch.float64))
    seen, other = zoo.inputs(name), zoo.inputs(name, seed=7, length=5, padded="left")
    before, wanted = {key: value.clone() for key, value in model.state_dict().items()}, forward(model, other)
    assert rotate(model, seen) <= EXACT
    assert error(forward(model, other), wanted) <= EXACT
    turned = [key for key in before if key.endswith(("_proj.weight", "embed_tokens.weight"))]
    assert not any(torch.equal(before[key], model.state_dict()[key]) for key in turned)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    weights = loaded.state_dict()
    assert all(torch.equal(weights[key], value) for key, value in model.state_dict().items())
    assert loaded.config.tie_word_embeddings is False


def test_a_large_channel_is_spread() -> None:
    """So that eight bits hold all sums."""
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] += 300.0
    batch = zoo.inputs("llama", length=20)
    wanted = forward(model, batch)

    def lost() -> float:
        with fake_w8a8(model, batch):
            return error(forward(model, batch), wanted)

    before = lost()
    rotate(model, batch)
    assert lost() < before / 2


@pytest.mark.parametrize("channels", [1, 2, 7, 12, 32, 36, 60, 576])
def test_the_matrix_is_orthogonal_and_spreads(channels: int) -> None:
    matrix = spreading(channels, torch.Generator().manual_seed(3))
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(channels, dtype=torch.float64), atol=1e-12, rtol=0)
    if channels != 7:  # whose matrix is random
        assert torch.allclose(matrix.abs(), torch.full_like(matrix, channels**-0.5))


def test_other_models_are_refused() -> None:
    for model in (zoo.build("gpt2"), zoo.build("llama").bfloat16(), patch_model(zoo.build("llama"), "belief")):
        with pytest.raises(ValueError, match="stock models of llama"):
            rotate(model, zoo.inputs("llama"))
