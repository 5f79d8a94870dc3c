"""The recipe's rotation: the same function with a rotated residual stream, found without names; else it is refused."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor, nn

from hf_attn_swap.conversion.rescalable_edge import is_norm
from hf_attn_swap.quantization import fake_w8a8
from tests import zoo
from tests.contract.harness import forward
from tests.conversion.weights import bits, same, uneven
from tests.harness.recipes import RECIPES, needs_recipes

pytestmark = needs_recipes
sys.path.insert(0, str(RECIPES))
try:
    from rotate import affine, commutes, mean_keeping, rotate, spreading
finally:
    sys.path.remove(str(RECIPES))

EXACT = 1e-12  # relative, in float64


ROTATED = {
    "llama": (3, 3, 7),
    "mistral": (3, 3, 7),
    "qwen2": (3, 3, 7),  # with biases
    "qwen3": (3, 3, 7),  # with norms of queries and keys, which are none of the stream
    "gemma": (3, 3, 7),  # its norms multiply by 1 + w
    "gpt2": (0, 3, 7),  # LayerNorm, Conv1D, learned positions; queries, keys and values by one matrix
    "opt": (3, 3, 7),  # LayerNorm, biases, learned positions
    "gpt_neox": (0, 3, 7),  # two norms read the same stream
}


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A stock model whose norms have uneven weights."""
    return uneven(zoo.build(name, dtype=dtype))


def error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def stream_norms(model: Any, batch: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """What each norm over all channels reads and gives, by path."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda _, args, out, path=path: found.update({path: (args[0], out)}))
        for path, module in model.named_modules()
        if is_norm(module)
    ]
    forward(model, batch)
    for hook in hooks:
        hook.remove()
    return {path: pair for path, pair in found.items() if pair[0].dim() == 3}


@pytest.mark.parametrize("name", ROTATED)
def test_the_same_function(name: str, tmp_path: Path) -> None:
    model, seen, other = build(name), zoo.inputs(name), zoo.inputs(name, seed=7, length=5, padded="left")
    weights, wanted, before = bits(model), forward(model, other), stream_norms(model, seen)
    found = rotate(model, seen)
    assert (found.heads, found.attentions, found.norms) == ROTATED[name]
    assert found.error <= EXACT
    assert error(forward(model, other), wanted) <= EXACT
    now = bits(model)
    turned = [key for key, value in weights.items() if value.dim() == 2 and ("_proj" in key or "embed" in key)]
    assert not any(torch.equal(weights[key], now[key]) for key in turned)
    after = stream_norms(model, seen)
    for path, (read, _) in after.items():
        assert not torch.allclose(read, before[path][0], atol=1e-3), path
        assert torch.allclose(read.norm(dim=-1), before[path][0].norm(dim=-1), rtol=1e-6), "a rotation keeps lengths"
    assert found.before.largest == pytest.approx(max(float(read.abs().max()) for read, _ in before.values()))
    assert found.after.largest == pytest.approx(max(float(read.abs().max()) for read, _ in after.values()))
    read = before[found.before.norm][0].abs()
    assert found.before.medians == pytest.approx(float(read.max() / read.median()))
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert same(bits(loaded), now)
    assert not hasattr(loaded.config, "attn_swap")
    assert loaded.config.tie_word_embeddings is False


MASKED = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
SHARED = {
    "matrix": lambda: T.LlamaForCausalLM(T.LlamaConfig(**MASKED, tie_word_embeddings=True)),
    "matrix and bias": lambda: T.MegatronBertForMaskedLM(T.MegatronBertConfig(**MASKED)),
    "matrix and bias, XL": lambda: T.XLMRobertaXLForMaskedLM(T.XLMRobertaXLConfig(**MASKED, pad_token_id=1)),
}


@pytest.mark.parametrize("shared", SHARED)
def test_what_the_head_shares_is_its_own_afterwards(shared: str, tmp_path: Path) -> None:
    """Also after saving and loading, where the config says that nothing is tied."""
    torch.manual_seed(0)
    model, batch = SHARED[shared]().eval(), {"input_ids": torch.randint(5, 64, (2, 9))}
    head = model.get_output_embeddings()
    assert head.weight is model.get_input_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
    wanted = forward(model, batch)
    found = rotate(model, batch)
    assert found.untied
    assert "The head has a matrix of its own now." in str(found)
    assert error(forward(model, batch), wanted) <= 1e-5
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert error(forward(loaded.eval(), batch), wanted) <= 1e-5


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
    found = rotate(model, batch)
    assert found.before.largest > 290
    assert found.after.largest < found.before.largest / 3
    assert lost() < before / 2
    assert f"{found.after.medians:,.0f} medians ({found.before.largest:,.0f}, " in str(found)
    assert "The residual stream (32 channels) is rotated, and so are the values of 3 of 3" in str(found)
    assert f"{found.error:.1e}" in str(found)
    assert "but not the values of the heads" in str(rotate(zoo.build("gpt2"), zoo.inputs("gpt2")))


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 32).double())

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


def added(model: Any) -> None:
    """A parameter is added to the stream."""
    model.model.layers[1].register_forward_hook(lambda module, args, out: out + torch.linspace(0, 1, 32).double())


@pytest.mark.parametrize("channels", [1, 2, 8, 9, 12, 15, 28, 36, 52, 80, 104, 576])
def test_the_matrices_are_orthogonal(channels: int) -> None:
    for make in (spreading, mean_keeping):
        one, two = (make(channels, torch.Generator().manual_seed(seed)) for seed in (0, 1))
        assert one.dtype == torch.float64
        assert torch.allclose(one.T @ one, torch.eye(channels, dtype=torch.float64), atol=1e-12)
        assert channels < 3 or not torch.allclose(one, two)
    ones = torch.ones(channels, dtype=torch.float64)
    assert torch.allclose(one @ ones, ones)
    sizes = spreading(channels, torch.Generator().manual_seed(0)).abs()
    odd = {9, 15, 52}  # no Hadamard matrix of these orders, or none by Paley's constructions
    assert torch.allclose(sizes, torch.full_like(sizes, channels**-0.5)) == (channels not in odd)
    power = channels & -channels
    blocks = sizes.view(channels // power, power, channels // power, power)
    assert torch.allclose(blocks, blocks[:, :1, :, :1].expand_as(blocks))


def test_the_form_of_a_norm() -> None:
    """w and b as they are called, 1 + w, and what commutes with which rotation."""
    layer_norm = nn.LayerNorm(8).double()
    root_mean = T.models.llama.modeling_llama.LlamaRMSNorm(8)
    plus_one = T.models.gemma.modeling_gemma.GemmaRMSNorm(8)
    generator = torch.Generator().manual_seed(0)
    turns = [spreading(8, generator), mean_keeping(8, generator)]
    wanted = {layer_norm: (0.0, [False, True]), root_mean: (0.0, [True, True]), plus_one: (1.0, [True, True])}
    for norm, (a, which) in wanted.items():
        with torch.no_grad():
            for parameter in norm.parameters():
                parameter.copy_(torch.randn(8, generator=generator))
        form = affine(norm, 8)
        assert form is not None
        assert (form.weight, form.bias) == ("weight", "bias" if norm is layer_norm else None)
        assert form.neutral == 1 - a
        assert torch.allclose(form.scale, norm.weight.double() + a)
        assert (form.shift is None) == (norm is not layer_norm)
        assert form.shift is None or torch.equal(form.shift, layer_norm.bias)
        assert [commutes(norm, form, turn) for turn in turns] == which
    assert affine(nn.LayerNorm(8, bias=False), 8) is not None
    assert affine(T.models.llama.modeling_llama.LlamaRMSNorm(1), 8) is None, "one weight for all channels"
