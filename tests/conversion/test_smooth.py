"""Smoothing finds free channels without names, keeps the function to the bit, and is taken back to the bit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as T
from torch import nn

from hf_attn_swap import describe, patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion import smooth
from hf_attn_swap.conversion.smooth import ALPHAS, Smoothed
from hf_attn_swap.quantization import machine_w8a8
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, forward, fresh, padding_side, perturb, refused, swaps
from tests.generic import harness as generic
from tests.generic.harness import SUBJECTS
from tests.harness.adapters import lora
from tests.harness.places import in_turn

from .weights import bits, same, uneven

# PEFT reads a property that transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
VARIANTS = ("softmax", "sink", "gated", "belief_star", "modern_hopfield", "simpletron_resl")
WITH_PLACES = [name for name in FAMILY_NAMES if name != "albert"]  # its layers share one block
NOTHING_FREE = {("bert", "sink"), ("bert", "belief_star")}  # in post-norm blocks values alone are free, there not

# What is found around a block with stock attention: the last names of the source and of its readers.
QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
LLAMA = {("input_layernorm", *QKV), ("post_attention_layernorm", *MLP), ("up_proj", "down_proj")}
BERT = {("value", "dense")}
VIT = {("layernorm_before", *QKV), ("layernorm_after", "fc1"), ("v_proj", "o_proj")}
FOUND: dict[str, set[tuple[str, ...]]] = {
    "bert": BERT,
    "gpt2": {("ln_1", "c_attn"), ("ln_2", "c_fc")},  # GELU follows c_fc, and values are a part of c_attn
    "llama": LLAMA,
    "opt": {("self_attn_layer_norm", *QKV), ("final_layer_norm", "fc1"), ("fc1", "fc2"), ("v_proj", "out_proj")},
    "vit": VIT,
    "roberta": BERT,
    "electra": BERT,
    "bert_cross": BERT,
    "distilbert": {("v_lin", "out_lin")},
    "deit": VIT,
    "dinov2": {("norm1", *QKV), ("norm2", "fc1"), ("v_proj", "o_proj")},
    "clip_vision": {("layer_norm1", *QKV), ("layer_norm2", "fc1"), ("v_proj", "out_proj")},
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "gemma": {("up_proj", "down_proj")},  # the norm multiplies by 1 + w, so that a scale of w is no scale of the output
    "gemma2": {("up_proj", "down_proj")},
    "gpt_neox": {("input_layernorm", "query_key_value"), ("post_attention_layernorm", "dense_h_to_4h")},
    "modernbert": {("attn_norm", "Wqkv"), ("mlp_norm", "Wi")},
    "whisper": {("self_attn_layer_norm", *QKV), ("final_layer_norm", "fc1"), ("v_proj", "out_proj")},
}


def batches_of(name: str, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [batch_of(name, dtype, seed=seed) for seed in range(2)]


def sources(model: Any) -> list[list[str]]:
    """The last name of every smoothed source, layer by layer."""
    fits = [swap.smoothing for swap in swaps(model)]
    return [[] if fit is None else [pair.source.rpartition("/")[2] for pair in fit.pairs] for fit in fits]


@in_turn(WITH_PLACES, VARIANTS)
def test_the_same_function_and_the_way_back(name: str, variant: str, tmp_path: Path) -> None:
    stock, batch = uneven(fresh(name, torch.float32)), batch_of(name, torch.float32, padded=padding_side(name))
    weights = bits(stock)
    model = perturb(patch_model(stock, variant))
    wanted = {strength: forward(set_strength(model, strength), batch) for strength in (0.0, 0.6, 1.0)}
    if (name, variant) in NOTHING_FREE:
        before = copy.deepcopy(model.state_dict())
        with refused("no place of BertForMaskedLM", "quantise it without smoothing"):
            smooth(model, batches_of(name), 0.5, progress=False)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        return
    report = smooth(model, batches_of(name), 0.5, progress=False)
    assert report.kept == 0
    assert not same(bits(model), weights)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.attn_swap == model.config.attn_swap
    assert "smoothed (" in str(describe(loaded))
    for each in (model, loaded, copy.deepcopy(model)):
        for strength, out in wanted.items():
            assert torch.equal(forward(set_strength(each, strength), batch), out)
        unpatch_model(each)
        assert same(bits(each), weights)
        assert torch.equal(forward(each, batch), wanted[0.0])


@pytest.mark.parametrize("name", [*FAMILY_NAMES, *SUBJECTS])
def test_what_is_found(name: str) -> None:
    family = name in FAMILY_NAMES
    model = fresh(name, torch.float32) if family else generic.build(name, torch.float32)
    batch = batch_of(name, torch.float32) if family else generic.batch_of(name, torch.float32)
    weights = bits(model)
    patch_model(uneven(model) if family else model, "softmax")
    if name == "albert":
        with refused("no place of AlbertForMaskedLM", "shared weights", "quantise it without smoothing"):
            smooth(model, batch, 0.5, progress=False)
        assert all(swap.smoothing is None for swap in swaps(model))
        return
    smooth(model, batch, 0.5, progress=False)
    found = {
        (pair.source.rpartition("/")[2], *(reader.rpartition("/")[2] for reader in pair.readers))
        for swap in swaps(model)
        for pair in swap.smoothing.pairs
    }
    if name in FOUND:
        assert found == FOUND[name]
    assert found
    unpatch_model(model)
    assert family or same(bits(model), weights)


def test_an_outlier_is_found_and_eight_bits_hold() -> None:
    """One channel is 200 times the others, in every norm; the matrices that read it do not know."""
    model = fresh("llama", torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[7] *= 200
            for matrix in (*(getattr(layer.self_attn, key) for key in QKV), *(getattr(layer.mlp, key) for key in MLP)):
                matrix.weight[:, 7] /= 200
    batches = batches_of("llama")
    wanted = forward(patch_model(model, "softmax"), batches[0])

    def error() -> float:
        with machine_w8a8(model, batches):
            return float((forward(model, batches[0]) - wanted).norm() / wanted.norm())

    before = error()
    report = smooth(model, batches, progress=False)
    assert isinstance(report, Smoothed)
    norms = [key for key in report.alphas if "norm" in key]
    assert len(norms) == 6
    assert all(report.alphas[key] > 0 for key in norms)
    assert all(report.spread[key][0] > 50 > 20 > report.spread[key][1] for key in norms)
    assert error() < before / 4
    assert "places are smoothed" in str(report)


@pytest.mark.parametrize("alpha", [0.25, 0.75])
def test_the_powers_of_the_formula(alpha: float) -> None:
    """k = alpha log2 max|x| - (1 - alpha) log2 max|w|, less its median: in the first layer, by hand."""
    model, seen = uneven(fresh("llama", torch.float32)), []
    layer = model.model.layers[0]
    handle = layer.input_layernorm.register_forward_hook(lambda module, args, output: seen.append(output.flatten(0, 1)))
    for batch in batches_of("llama"):
        forward(model, batch)
    handle.remove()
    sizes = torch.cat(seen).abs().amax(0)
    columns = torch.cat([getattr(layer.self_attn, name).weight.detach() for name in QKV]).abs().amax(0)
    scale = alpha * sizes.log2() - (1 - alpha) * columns.log2()
    smooth(patch_model(model, "softmax"), batches_of("llama"), alpha, progress=False)
    fit = swaps(model)[0].smoothing
    place = next(number for number, pair in enumerate(fit.pairs) if pair.source == "../input_layernorm")
    wanted = (scale - scale.median()).round().to(torch.int8)
    assert wanted.unique().numel() >= 3
    assert torch.equal(fit.powers(place), wanted)


def rounded(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, largest: int) -> torch.Tensor:
    """Whole steps from 0 to `largest` between two ends."""
    step = (high - low) / largest
    zero = (-low / step).round()
    return ((x / step).round() + zero).clamp(0, largest).sub(zero) * step


def test_the_alpha_of_the_smallest_error() -> None:
    """Of the held-out products of activations and matrices in 8 bits, with ranges of the other batch, by hand."""
    model, batches, seen = uneven(fresh("llama", torch.float32)), batches_of("llama"), []
    layer = model.model.layers[0]
    with torch.no_grad():
        layer.input_layernorm.weight[3] *= 60  # an outlier that its readers know: neither end of alpha is the best
    handle = layer.input_layernorm.register_forward_hook(lambda module, args, output: seen.append(output.flatten(0, 1)))
    for batch in batches:
        forward(model, batch)
    handle.remove()
    matrices = [getattr(layer.self_attn, name).weight.detach() for name in QKV]
    fitted, held_out = seen
    sizes, columns = fitted.abs().amax(0), torch.cat(matrices).abs().amax(0)
    errors = {}
    for alpha in ALPHAS:
        scale = alpha * sizes.log2() - (1 - alpha) * columns.log2()
        factors = (scale - scale.median()).round().exp2() if alpha else torch.ones_like(scale)
        low, high = fitted.div(factors).aminmax()
        errors[alpha] = 0.0
        for matrix in matrices:
            most = (matrix * factors).abs().amax(1, keepdim=True)
            product = rounded(held_out / factors, low, high, 255) @ rounded(matrix * factors, -most, most, 254).T
            wanted = held_out @ matrix.T
            errors[alpha] += float((product - wanted).square().sum() / wanted.square().sum())
    best = min(errors, key=lambda alpha: errors[alpha])
    report = smooth(patch_model(model, "softmax"), batches, progress=False)
    assert report.alphas["model.layers.0.input_layernorm"] == best
    assert 0 < best < 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_bit_is_lost_at_the_ends_of_a_dtype(dtype: torch.dtype) -> None:
    """Weights near the smallest and the largest number keep their channel as it is, and all come back."""
    model = uneven(fresh("llama", dtype))
    info = torch.finfo(dtype)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.weight[3, :8] = info.smallest_normal * 1.5
            layer.mlp.up_proj.weight[5, 4] = info.smallest_normal * (1 + info.eps)
            layer.self_attn.q_proj.weight[2, 9] = 3 * info.tiny * info.eps  # a subnormal number
    weights, batch = bits(model), batch_of("llama", dtype)
    wanted = forward(patch_model(model, "softmax"), batch)
    report = smooth(model, [batch], 0.9, progress=False)
    assert report.kept > 0
    assert f"{report.kept} channels are left" in str(report)
    assert not same(bits(model), weights)
    assert torch.allclose(forward(model, batch).double(), wanted.double(), rtol=0, atol=float(info.eps) * 8)
    assert same(bits(unpatch_model(model)), weights)


def smoothed(name: str = "llama", dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, torch.Tensor]]:
    """A smoothed model, and the weights of before."""
    model = uneven(fresh(name, dtype))
    weights = bits(model)
    smooth(patch_model(model, "sink"), batches_of(name, dtype), 0.5, progress=False)
    return model, weights


@pytest.mark.filterwarnings("ignore:layers .* lose the converted:UserWarning")
def test_a_layer_that_leaves_takes_its_powers_along() -> None:
    """Its swap is taken out, or another swap takes its place; the other layers stay smoothed."""
    model, weights = smoothed()
    batch = batch_of("llama", torch.float32)
    stock = forward(set_strength(model, 0.0), batch)
    unpatch_model(model, layers=[0])
    patch_model(model, "belief", layers=[1], strength=0.0)
    now = bits(model)
    changed = {key.split(".")[2] for key, value in now.items() if not torch.equal(value, weights[key])}
    assert changed == {"2"}
    assert sources(model) == [[], ["input_layernorm", "post_attention_layernorm", "up_proj"]]
    assert torch.equal(forward(model, batch), stock)
    assert same(bits(unpatch_model(model)), weights)


def test_an_error_leaves_the_weights() -> None:
    model = patch_model(uneven(fresh("llama", torch.float32)), "sink")
    weights, block = bits(model), copy.deepcopy(model.config.attn_swap)
    with pytest.raises(IndexError):
        smooth(model, {"input_ids": torch.full((1, 4), 10**6)}, 0.7, progress=False)
    assert same(bits(model), weights)
    assert model.config.attn_swap == block


def test_a_cast_to_less_room_is_not_taken_back() -> None:
    model, weights = smoothed()
    batch = batch_of("llama", torch.float32)
    half = copy.deepcopy(model).half()
    with refused("smoothed in float32 and then cast to float16", "load the model in float32"):
        unpatch_model(half)
    assert sources(half) == sources(model)
    wide = unpatch_model(copy.deepcopy(model).double())
    assert same(bits(wide), {key: value.double() for key, value in weights.items()})
    short = unpatch_model(copy.deepcopy(model).bfloat16())
    assert same(bits(short), {key: value.bfloat16() for key, value in weights.items()})
    assert torch.isfinite(forward(model, batch)).all()


def test_adapters() -> None:
    """They come after smoothing, and go before it is taken back."""
    model, weights = smoothed()
    config = peft.LoraConfig(target_modules=["q_proj", "up_proj"])
    wrapped: Any = peft.get_peft_model(model, config)
    with refused("was smoothed", "take adapters"):
        unpatch_model(wrapped)
    assert all(swap.smoothing is not None for swap in swaps(wrapped))
    model = wrapped.unload()
    assert same(bits(unpatch_model(model)), weights)
    wrapped = peft.get_peft_model(patch_model(model, "sink"), config)
    with refused("has adapters; smooth it before"):
        smooth(wrapped, batches_of("llama"), 0.5, progress=False)


def test_an_adapter_of_other_scales(tmp_path: Path) -> None:
    """One of the base model is refused, by PEFT and by transformers; one that was trained on this model is loaded."""
    fresh("llama", torch.float32).save_pretrained(tmp_path / "stock")
    stock = T.LlamaForCausalLM.from_pretrained(tmp_path / "stock")
    peft.get_peft_model(stock, lora("llama")).save_pretrained(tmp_path / "of_stock")
    model = patch_model(T.LlamaForCausalLM.from_pretrained(tmp_path / "stock"), "softmax")
    smooth(model, batches_of("llama"), 0.5, progress=False)
    for load in (lambda folder: peft.PeftModel.from_pretrained(copy.deepcopy(model), folder), model.load_adapter):
        with refused("conversion.smooth", "merge_and_unload"):
            load(tmp_path / "of_stock")
    model = patch_model(T.LlamaForCausalLM.from_pretrained(tmp_path / "stock"), "softmax")
    smooth(model, batches_of("llama"), 0.5, progress=False)
    model.save_pretrained(tmp_path / "smoothed")
    own = peft.get_peft_model(T.LlamaForCausalLM.from_pretrained(tmp_path / "smoothed"), lora("llama"))
    own.save_pretrained(tmp_path / "own")
    loaded = set_strength(T.LlamaForCausalLM.from_pretrained(tmp_path / "smoothed"), 0.5)
    peft.PeftModel.from_pretrained(loaded, tmp_path / "own")
    model = patch_model(unpatch_model(model), "softmax")
    smooth(model, batches_of("llama"), 0.9, progress=False)  # other powers than those of the folder
    with refused("conversion.smooth"):
        peft.PeftModel.from_pretrained(model, tmp_path / "own")


def test_weights_that_two_modules_share_are_left() -> None:
    model = fresh("llama", torch.float32)
    model.model.layers[1].mlp.gate_proj.weight = model.model.layers[2].mlp.gate_proj.weight
    weights, batch = bits(uneven(model)), batch_of("llama", torch.float32)
    wanted = forward(patch_model(model, "softmax"), batch)
    smooth(model, batches_of("llama"), 0.5, progress=False)
    left = ["input_layernorm", "up_proj"]
    assert sources(model) == [["input_layernorm", "post_attention_layernorm", "up_proj"], left, left]
    assert torch.equal(forward(model, batch), wanted)
    assert same(bits(unpatch_model(model)), weights)


@pytest.mark.parametrize("inside", [nn.GELU(), nn.LayerNorm(32)], ids=["gelu", "norm"])
def test_something_between_a_norm_and_a_matrix(inside: nn.Module) -> None:
    model = fresh("llama", torch.float32)
    core = model.model.layers[1].self_attn
    core.q_proj = nn.Sequential(inside, core.q_proj)
    patch_model(model, "softmax")
    smooth(model, batches_of("llama"), 0.5, progress=False)
    assert "input_layernorm" not in sources(model)[1]
    assert "input_layernorm" in sources(model)[0]


class Experts(nn.Module):
    """Two matrices, of which the sign of the first number of a text's first token chooses one."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(wide, wide, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen: torch.Tensor = self.experts[int(x[0, 0, 0] > 0)](x)
        return chosen


def test_a_matrix_that_no_batch_reached() -> None:
    """Other texts may reach it, and it would read channels of another scale."""
    torch.manual_seed(0)
    model = fresh("llama", torch.float32)
    model.model.layers[1].mlp = Experts(model.config.hidden_size).eval()
    uneven(patch_model(model, "softmax"))
    texts = [batch_of("llama", torch.float32, seed=seed) for seed in range(16)]
    seen: set[int] = set()
    for number, expert in enumerate(model.model.layers[1].mlp.experts):
        expert.register_forward_hook(lambda *_, number=number: seen.add(number))
    wanted, reached = [], []
    for text in texts:
        seen.clear()
        wanted.append(forward(model, text))
        reached.append(set(seen))
    assert {0} in reached
    assert {1} in reached
    few = [text for text, found in zip(texts, reached, strict=True) if found == {0}]
    smooth(model, few[:1], 0.5, progress=False)
    assert "post_attention_layernorm" not in sources(model)[1]
    assert "post_attention_layernorm" in sources(model)[0]
    for text, before in zip(texts, wanted, strict=True):
        assert torch.equal(forward(model, text), before)


def test_a_reader_that_autograd_does_not_see() -> None:
    """The outputs are compared, and places of this kind are left."""
    model = patch_model(uneven(fresh("llama", torch.float32)), "softmax")
    seen: list[torch.Tensor] = []
    norm, mlp = model.model.layers[1].post_attention_layernorm, model.model.layers[1].mlp
    norm.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    mlp.register_forward_hook(lambda module, args, output: output + seen.pop())
    batch = batch_of("llama", torch.float32)
    wanted = forward(model, batch)
    smooth(model, batches_of("llama"), 0.5, progress=False)
    assert sources(model) == [["input_layernorm", "up_proj"]] * 3
    assert torch.equal(forward(model, batch), wanted)


def test_padding_does_not_count() -> None:
    """The sizes of channels come from real tokens alone."""
    batch = batch_of("llama", torch.float32)
    ids = batch["input_ids"]
    padded = {
        "input_ids": torch.cat([torch.full_like(ids, 7), ids], 1),
        "attention_mask": torch.cat([torch.zeros_like(ids), torch.ones_like(ids)], 1),
        "position_ids": torch.cat([torch.zeros_like(ids), torch.arange(ids.shape[1]).expand_as(ids)], 1),
    }
    plain, other = (patch_model(uneven(fresh("llama", torch.float32)), "softmax") for _ in range(2))
    smooth(plain, {"input_ids": ids}, 0.5, progress=False)
    smooth(other, padded, 0.5, progress=False)
    for one, two in zip(swaps(plain), swaps(other), strict=True):
        assert all(torch.equal(one.smoothing.powers(number), two.smoothing.powers(number)) for number in range(3))


def test_refused() -> None:
    batches = batches_of("llama")
    with refused("not patched"):
        smooth(fresh("llama", torch.float32), batches)
    with refused("smoothed already"):
        smooth(smoothed()[0], batches)
    model = patch_model(fresh("llama", torch.float32), "softmax")
    for alpha in (0, -0.5, 1.5, True, "0.5", float("nan")):
        with refused("alpha must be a number above 0 and at most 1"):
            smooth(model, batches, alpha)
    with refused("one batch cannot be both measured and held out"):
        smooth(model, batches[0])
    with refused("there are no batches"):
        smooth(model, [], 0.5)
    bert = T.BertModel(T.BertConfig(**BERT_SIZES)).eval()
    for layer in bert.encoder.layer:
        layer.attention.output.dense = nn.Sequential(nn.Tanh(), layer.attention.output.dense)
    with refused("no place of BertModel", "post-norm blocks"):
        smooth(patch_model(bert, "outeffhop"), {"input_ids": torch.arange(1, 9)[None]}, 0.5, progress=False)


BERT_SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
