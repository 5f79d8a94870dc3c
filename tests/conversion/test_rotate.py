"""`rotate`: the same function with a rotated residual stream, found without names; what cannot be so is refused."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as T
from torch import Tensor, nn

from hf_attn_swap import patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion import absorb_sink, rotate, smooth
from hf_attn_swap.conversion.neutral import is_norm
from hf_attn_swap.conversion.norms import affine, commutes
from hf_attn_swap.conversion.orthogonal import mean_keeping, spreading
from hf_attn_swap.families import sites
from hf_attn_swap.quantization import fake_w8a8
from tests import zoo
from tests.contract.harness import batch_of, forward, fresh, refused
from tests.harness.process import python

from .converting import converted, rows, stock
from .letters import Letters
from .weights import bits, same, uneven

# PEFT reads a property that transformers has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

EXACT = 1e-12  # relative, in float64
NARROW = {"cohere": 1e-6}  # its norm computes in fp32 also in a model in float64
SIZES = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
SIZES |= dict(num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2)

# Per model: the attention modules whose values are rotated, of all; and the norms of the stream.
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
BY_CONFIG: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {
    "phi3": ((0, 2, 5), {}),  # fused
    "cohere": ((2, 2, 3), {}),  # one norm for attention and MLP, which subtracts the mean and has no bias
    "granite": ((2, 2, 5), {"residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "nemotron": ((2, 2, 5), {}),  # a LayerNorm with 1 + w
    "olmo": ((0, 0, 0), {}),  # norms without parameters
    "mixtral": ((0, 0, 0), {"num_local_experts": 4}),
    "olmo2": ((0, 0, 0), {}),
    "xglm": ((0, 0, 0), {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
}
POST = "is added to the residual stream, or is this stream"
REFUSED = {
    "bert": "no layer of BertForMaskedLM adds to what its embeddings give",
    "albert": "no layer of AlbertForMaskedLM adds to what its embeddings give",
    "vit": "no embedding of ViTForImageClassification reaches a norm",
    "gemma2": f"post_attention_layernorm gives {POST}",
    "modernbert": "no layer of ModernBertForMaskedLM adds",
    "bloom": "no layer of BloomModel adds",
    "whisper": "conv2 (Conv1d) reaches the residual stream",
    "t5": "final_layer_norm gives as an output",
    "mixtral": f"post_attention_layernorm gives {POST}",
    "olmo2": f"post_attention_layernorm gives {POST}",
    "olmo": "no embedding of OlmoForCausalLM reaches a norm",
    "xglm": "is another function: something reads or writes the residual stream",  # positions without an embedding
}


def by_config(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny model of an architecture that the zoo does not have."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = T.AutoConfig.for_model(name, **(SIZES | BY_CONFIG[name][1]))
        model = T.AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if dtype == torch.float64 and type(module).__name__.endswith("RMSNorm"):
            module.__class__ = zoo._wide(type(module))
    return model.to(dtype).eval()


def build(name: str, dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """A stock model whose norms have uneven weights."""
    return uneven(by_config(name, dtype) if name in BY_CONFIG else zoo.build(name, dtype=dtype, **config))


def inputs(name: str, **given: Any) -> dict[str, Tensor]:
    if name in BY_CONFIG:
        return zoo.inputs("llama", **given)
    return zoo.inputs(name, **given)


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


@pytest.mark.parametrize("name", [*ROTATED, *(name for name, (places, _) in BY_CONFIG.items() if places[2])])
def test_the_same_function(name: str, tmp_path: Path) -> None:
    model, seen, other = build(name), inputs(name), inputs(name, seed=7, length=5, padded="left")
    weights, wanted, before = bits(model), forward(model, other), stream_norms(model, seen)
    found = rotate(model, seen)
    heads, attentions, norms = ROTATED.get(name) or BY_CONFIG[name][0]
    if not sites(model):  # Nemotron's attention in transformers 5.10
        heads, attentions = 0, 0
    assert (found.heads, found.attentions, found.norms) == (heads, attentions, norms)
    assert found.error <= NARROW.get(name, EXACT)
    assert error(forward(model, other), wanted) <= NARROW.get(name, EXACT)
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


def test_norms_are_neutral() -> None:
    """Weights of 1, and of 0 where the norm multiplies by 1 + w; norms of queries and keys keep theirs."""
    for name, neutral in (("llama", 1.0), ("gemma", 0.0), ("qwen3", 1.0)):
        model = build(name)
        rotate(model, inputs(name))
        for path, module in model.named_modules():
            if is_norm(module):
                assert bool((module.weight == neutral).all()) == (path.split(".")[-1] not in ("q_norm", "k_norm"))


def test_a_shared_head_gets_its_own_matrix(tmp_path: Path) -> None:
    """In a process that has not heard of this package, too."""
    model = zoo.build("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    found = rotate(model, inputs("llama"))
    assert found.untied
    assert "The head has a matrix of its own now." in str(found)
    assert model.lm_head.weight.requires_grad
    model.tie_weights()
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert "own now" not in str(rotate(zoo.build("llama"), inputs("llama")))
    model.save_pretrained(tmp_path)
    ids = inputs("llama")["input_ids"]
    code = (
        "import sys, json, torch, transformers\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(tmp_path)!r}).eval()\n"
        f"with torch.no_grad(): out = model(torch.tensor({ids.tolist()})).logits\n"
        "assert 'hf_attn_swap' not in sys.modules\n"
        "print(json.dumps([type(model).__name__, out.tolist()]))\n"
    )
    kind, out = json.loads(python("-c", code).stdout.splitlines()[-1])
    assert kind == "LlamaForCausalLM"
    assert error(torch.tensor(out), forward(zoo.build("llama", tie_word_embeddings=True), {"input_ids": ids})) <= 1e-5


def test_a_large_channel_is_spread() -> None:
    """So that eight bits hold all sums."""
    model = zoo.build("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 5] += 300.0
    batch = inputs("llama", length=20)
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
    assert "but not the values of the heads" in str(rotate(zoo.build("gpt2"), inputs("gpt2")))


def test_padding_does_not_count() -> None:
    model, batch = zoo.build("llama"), inputs("llama", padded="left")
    batch["input_ids"][0, :2] = 2
    with torch.no_grad():
        model.model.embed_tokens.weight[2] = 1000.0
    found = rotate(model, batch)
    assert max(found.before.largest, found.after.largest) < 100


@pytest.mark.parametrize("variant", ["sink", "outeffhop", "clipped_softmax", "entmax15", "belief", "window"])
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_variants_on_top(name: str, variant: str) -> None:
    """What they compute does not depend on the basis of the stream or of the values."""
    batch = batch_of(name, padded="left")
    options = {"gamma": -0.1} if variant == "clipped_softmax" else {}
    other, model = fresh(name), fresh(name)
    rotate(model, batch_of(name))
    rotated = bits(model)
    for each in (other, model):
        patch_model(each, variant, **options)
    for strength in (0.0, 0.5, 1.0):
        set_strength(other, strength)
        assert error(forward(set_strength(model, strength), batch), forward(other, batch)) <= EXACT
    assert same(bits(unpatch_model(model)), rotated)


def test_a_sink_and_smoothed_channels_on_top() -> None:
    batch = batch_of("llama", torch.float32)
    other, model = (fresh("llama", torch.float32) for _ in range(2))
    rotate(model, batch)
    rotated = bits(model)
    sinks = [absorb_sink(patch_model(each, "sink"), Letters(), ["a text"], tokens=[7]) for each in (other, model)]
    assert sinks[0].tokens == sinks[1].tokens
    assert error(forward(model, batch), forward(other, batch)) <= 1e-5
    assert "9 of 9 places" in str(smooth(model, batch, 0.5, progress=False)).replace("The channels of ", "")
    assert error(forward(model, batch), forward(other, batch)) <= 1e-5
    assert same(bits(unpatch_model(model)), rotated)


def test_a_conversion_on_top() -> None:
    """Swap and fit lose what they lose without a rotation; the steps in 8 bits run."""
    reports = []
    for turned in (False, True):
        model = stock("llama")
        if turned:
            rotate(model, batch_of("llama"))
        reports.append(converted(model, "outeffhop", rows("llama"), tokens=1, bits=8))
    one, other = ({row.name: row.lost.cost for row in report.steps} for report in reports)
    assert one.keys() == other.keys()
    assert {"swap", "fit: map", "8-bit integers"} <= one.keys()
    for name in ("swap", "fit: map"):
        assert other[name] == pytest.approx(one[name], rel=1e-3)
        assert one[name] > 0.05


def test_generation_with_a_cache() -> None:
    model, ids = fresh("llama"), batch_of("llama")["input_ids"]
    wanted = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None)
    rotate(model, {"input_ids": ids})
    assert torch.equal(model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=None), wanted)


def test_a_matrix_may_read_the_stream_without_a_norm() -> None:
    model, batch = build("llama"), inputs("llama")
    model.model.norm = nn.Identity()
    wanted = forward(model, batch)
    assert rotate(model, batch).norms == 6
    assert error(forward(model, batch), wanted) <= EXACT


def test_what_is_added_to_a_writer_is_a_writer() -> None:
    """It reaches no norm itself: a matrix reads the sum, and writes the stream."""
    model, batch = build("llama"), inputs("llama")
    mlp = model.model.layers[0].mlp
    mlp.after, mlp.beside = (nn.Linear(32, 32).double() for _ in range(2))
    mlp.register_forward_hook(lambda module, args, out: out + module.after(out + module.placed_like(args[0])))
    wanted = forward(model, batch)
    rotate(model, batch)
    assert error(forward(model, batch), wanted) <= EXACT


@pytest.mark.parametrize("runs", [True, False])
def test_embeddings_may_share_a_table(runs: bool) -> None:
    """It is rotated once; the second embedding runs later, or not at all."""
    model, batch = build("llama", tie_word_embeddings=True), inputs("llama")
    other, ids = nn.Embedding(64, 32), batch["input_ids"]
    model.model.other, other.weight = other, model.model.embed_tokens.weight
    if runs:
        model.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] + other(ids), *args[1:]))
    wanted = forward(model, batch)
    assert rotate(model, batch).untied
    assert error(forward(model, batch), wanted) <= EXACT
    assert other.weight is model.model.embed_tokens.weight


def test_a_few_rows_of_a_weight_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    models = fresh("gpt2"), fresh("gpt2")
    rotate(models[0], batch_of("gpt2"))
    monkeypatch.setattr(importlib.import_module("hf_attn_swap.conversion.rotate"), "ROWS", 7)
    rotate(models[1], batch_of("gpt2"))
    one, other = map(bits, models)
    assert all(torch.allclose(value, other[key], rtol=1e-12, atol=1e-14) for key, value in one.items())


def test_after_unpatching() -> None:
    model, other = fresh("llama"), fresh("llama")
    rotate(unpatch_model(patch_model(model, "sink")), batch_of("llama"))
    rotate(other, batch_of("llama"))
    assert same(bits(model), bits(other))


def test_the_seed() -> None:
    models = [fresh("llama") for _ in range(4)]
    for model, seed in zip(models, ({}, {"seed": 0}, {"seed": 1}, {"seed": 2}), strict=True):
        rotate(model, batch_of("llama"), **seed)
    one, two, three, four = map(bits, models)
    assert same(one, two)
    assert not any(torch.equal(three[key], four[key]) for key in three if "proj" in key or "embed" in key)
    with refused("seed must be a whole number, got 0.5"):
        rotate(models[0], batch_of("llama"), seed=0.5)  # type: ignore[arg-type]


def test_values_stay_where_something_else_reads_them() -> None:
    """A gate on the heads bends what a rotation would mix: the stream is rotated alone."""
    model, batch = build("llama"), inputs("llama")
    gate = torch.linspace(0.5, 2, 32, dtype=torch.float64)
    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(lambda module, args: (args[0] * gate,))
    values = model.model.layers[0].self_attn.v_proj.weight.detach().clone()
    wanted = forward(model, batch)
    found = rotate(model, batch)
    assert (found.heads, found.norms) == (0, 7)
    assert error(forward(model, batch), wanted) <= EXACT
    gram = [weight @ weight.T for weight in (values, model.model.layers[0].self_attn.v_proj.weight.detach())]
    assert not torch.allclose(*gram)  # norms are folded
    other = build("llama")
    assert rotate(other, batch).heads == 3


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_the_caller_may_have_switched_gradients_off(without: Any) -> None:
    model, wanted = fresh("llama", torch.float32), fresh("llama", torch.float32)
    rotate(wanted, batch_of("llama"))
    batch = batch_of("llama")
    with without():
        rotate(model, batch)
    assert same(bits(model), bits(wanted))
    model.train()(**batch).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_the_mode_and_the_batches() -> None:
    """The model keeps its mode, labels count for nothing, and the first four batches are read."""
    model = fresh("llama").train()
    batches = [batch_of("llama", seed=seed) | {"labels": torch.zeros(1)} for seed in range(4)]
    modes: list[bool] = []
    model.register_forward_pre_hook(lambda module, args: modes.append(module.training))
    rotate(model, iter([*batches, {"input_ids": torch.full((1, 4), 10**6)}]))
    assert model.training
    assert modes == [False] * (1 + 4 + 1 + 4)
    with refused("there are no batches"):
        rotate(model, [])


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    model = build(name, torch.float32)
    weights = bits(model)
    with refused(REFUSED[name]):
        rotate(model, inputs(name))
    assert same(bits(model), weights)


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 32).double())

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight)


def added(model: Any) -> None:
    """A parameter is added to the stream."""
    model.model.layers[1].register_forward_hook(lambda module, args, out: out + torch.linspace(0, 1, 32).double())


def watched(model: Any) -> None:
    """Something without a plain matrix reads the stream, and writes nothing."""
    layer = model.model.layers[0]
    layer.router = Router()
    layer.register_forward_pre_hook(lambda module, args: (module.router(args[0]), None)[1])


def reshaped(model: Any) -> None:
    """A matrix reads every channel twice."""
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = nn.Linear(64, 48, bias=False).double()
    mlp.gate_proj.register_forward_pre_hook(lambda module, args: (torch.cat([args[0], args[0]], -1),))


def mixed(model: Any) -> None:
    """A matrix reads what a norm gives and what another matrix gives, as one sum."""
    mlp = model.model.layers[0].mlp
    mlp.other = nn.Linear(32, 32).double()
    mlp.gate_proj.register_forward_pre_hook(lambda module, args: (args[0] + mlp.other(args[0]),))


def two_share(model: Any) -> None:
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def unused(model: Any) -> None:
    """A matrix that does not run shares its weight with one that does, and has a bias of its own."""
    model.other = nn.Linear(32, 64).double()
    model.other.weight = model.lm_head.weight


def routed(model: Any) -> None:
    """Something without a plain matrix reads what a norm gives, and writes nothing."""
    mlp = model.model.layers[0].mlp
    mlp.router = Router()
    mlp.register_forward_pre_hook(lambda module, args: (module.router(args[0]), None)[1])


class Other(nn.Module):
    """A norm of one size with other numbers."""

    def __init__(self, how: Callable[..., Tensor], parameters: int = 1) -> None:
        super().__init__()
        for number in range(parameters):
            self.register_parameter(f"w{number}", nn.Parameter(torch.ones(32).double()))
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(x, *self.parameters())


def largest_norm(model: Any) -> None:
    """It divides by the largest channel, so that a rotation changes it."""
    model.model.layers[1].input_layernorm = Other(lambda x, w: x / x.abs().amax(-1, keepdim=True) * w)


def bent_norm(model: Any) -> None:
    """Its weight is squared."""
    model.model.layers[1].input_layernorm = Other(lambda x, w: x / x.norm(dim=-1, keepdim=True) * (w * w + 0.5 * w))
    with torch.no_grad():
        model.model.layers[1].input_layernorm.w0.mul_(0.7)


def two_weights(model: Any) -> None:
    model.model.layers[1].input_layernorm = Other(lambda x, w, v: x / x.norm(dim=-1, keepdim=True) * (w + v), 2)


def widened(model: Any) -> None:
    """A norm is read beside the stream."""
    layer = model.model.layers[1]
    kept: list[Tensor] = []
    layer.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    layer.mlp.gate_proj.register_forward_pre_hook(lambda module, args: (args[0] + kept.pop(),))


def hidden(model: Any) -> None:
    model.config.output_hidden_states = True


def not_finite(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")


def patched(model: Any) -> None:
    patch_model(model, "sink")


def offloaded(model: Any) -> None:
    model.lm_head.to("meta")


def halved(model: Any) -> None:
    model.lm_head.to(torch.bfloat16)


SPOILED: dict[Callable[[Any], None], tuple[str, ...]] = {
    added: ("is another function: something reads or writes the residual stream", "quantise it without a rotation"),
    two_share: ("mlp.up_proj", "share weights"),
    unused: ("other of LlamaForCausalLM did not run on the first batch", "pass a batch that reaches every part"),
    routed: ("post_attention_layernorm gives is read by model.layers.0.mlp.router, which is no plain matrix",),
    watched: ("model.layers.0.router reads the residual stream, and is no norm or plain matrix",),
    reshaped: ("mlp.gate_proj of LlamaForCausalLM reads the stream in another shape, not as 32 channels",),
    mixed: ("mlp.gate_proj reads something else beside what the norm model.layers.0.post_attention_layernorm gives",),
    largest_norm: ("layers.1.input_layernorm (Other) gives other numbers for rotated channels",),
    bent_norm: ("layers.1.input_layernorm (Other) is no product of normalised channels with one weight",),
    two_weights: ("layers.1.input_layernorm (Other) is no product of normalised channels with one weight",),
    widened: (f"layers.1.post_attention_layernorm gives {POST}",),
    hidden: ("the model gives its residual stream as an output (model.embed_tokens reaches it)",),
    not_finite: ("what LlamaForCausalLM gives is not finite",),
    patched: ("this model is patched", "unpatch it, or rotate the stock model first"),
    offloaded: ("weights of this model are offloaded; rotate it before it is dispatched",),
    halved: ("weights are in torch.bfloat16", "load the model with dtype=torch.float32"),
}


@pytest.mark.parametrize("spoil", SPOILED, ids=lambda spoil: spoil.__name__)
@pytest.mark.parametrize("tied", [False, True])
def test_nothing_changes_where_it_is_refused(spoil: Callable[[Any], None], tied: bool) -> None:
    model = zoo.build("llama", dtype=torch.float64, tie_word_embeddings=tied and spoil not in (offloaded, halved))
    spoil(model)
    weights, config = bits(model), copy.deepcopy(model.config)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with refused(*SPOILED[spoil]):
        rotate(model, inputs("llama"))
    assert all(each is parameters[key] for key, each in model.named_parameters(remove_duplicate=False))
    assert all(each.is_meta or torch.allclose(each, weights[key], 0, 0, True) for key, each in bits(model).items())
    assert model.config.to_dict() == config.to_dict()


def test_adapters_and_a_model_without_its_head() -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    with refused("this model has adapters; rotate it before they are added"):
        rotate(peft.get_peft_model(fresh("llama"), config), batch_of("llama"))
    with refused("norm gives as an output, which a rotation would change", "load a model without its head with it"):
        rotate(zoo.build("llama", head="base"), inputs("llama"))


def test_a_bias_behind_a_weight_of_zero() -> None:
    model = zoo.build("gpt2", dtype=torch.float64)
    with torch.no_grad():
        model.transformer.h[1].ln_1.weight[3] = 0
        model.transformer.h[1].ln_1.bias[3] = 1
    with refused("h.1.ln_1 (LayerNorm)", "or a weight is 0 beside a bias"):
        rotate(model, inputs("gpt2"))
    with torch.no_grad():
        model.transformer.h[1].ln_1.bias[3] = 0
    wanted = forward(model, inputs("gpt2"))
    rotate(model, inputs("gpt2"))
    assert error(forward(model, inputs("gpt2")), wanted) <= EXACT


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
    assert affine(Other(lambda x, b: x / x.norm(dim=-1, keepdim=True) + b), 32) is None, "a bias alone"
    assert affine(T.models.llama.modeling_llama.LlamaRMSNorm(1), 8) is None, "one weight for all channels"
