"""Models and calls that cannot be right are refused by name, never run with stock attention instead."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.models.bert.modeling_bert import BertCrossAttention

from hf_attn_swap import describe, patch_model, unpatch_model
from hf_attn_swap.wiring.implementations import NAME
from tests import zoo

from .cells import DEEP, FAMILY_NAMES
from .harness import batch_of, forward, fresh, refused, swaps

OWN_ATTENTION = [
    transformers.BloomConfig(vocab_size=32, hidden_size=16, n_layer=1, n_head=2),
    transformers.FalconConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
    transformers.MptConfig(vocab_size=32, d_model=16, n_layers=1, n_heads=2, max_seq_len=16),
]


@pytest.mark.parametrize("config", OWN_ATTENTION, ids=lambda config: config.model_type)
def test_attention_that_is_not_behind_the_interface(config: Any) -> None:
    model = transformers.AutoModel.from_config(config)
    before = model.config
    with refused(type(model).__name__, "attention interface", "nothing can be swapped"):
        patch_model(model, "belief")
    assert model.config is before
    assert not swaps(model)
    assert "nothing can be swapped" in str(describe(model))  # and not "0 of 0"


class OnlyCross(transformers.BertPreTrainedModel):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.crossattention = BertCrossAttention(config, layer_idx=0)
        self.post_init()


def tiny_bert(**overrides: Any) -> Any:
    sizes = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=16, **overrides)


def test_cross_attention_alone() -> None:
    with refused("OnlyCross: nothing can be swapped", "BertCrossAttention: cross-attention"):
        patch_model(OnlyCross(tiny_bert()), "belief")


@pytest.mark.parametrize("by_position", [False, True])
@pytest.mark.parametrize(
    ("family", "module", "name"),
    [
        ("gpt2", "transformer.h.0.attn", "encoder_hidden_states"),
        ("whisper", "model.decoder.layers.0.self_attn", "key_value_states"),
    ],
)
def test_self_attention_called_as_cross_attention(family: str, module: str, name: str, by_position: bool) -> None:
    """Whatever the argument is called, by its name or by its position: the keys would be those of other tokens."""
    model = patch_model(zoo.build(family), "belief")
    core = model.get_submodule(module)
    x = torch.zeros(1, 3, 32)
    between = list(inspect.signature(type(core).forward).parameters)[2:]
    given = (None,) * between.index(name) + (x,) if by_position else ()
    with refused("cross-attention has no values"):
        core(x, *given, **({} if by_position else {name: x}))


def test_no_transformers_model() -> None:
    for act in (lambda m: patch_model(m, "belief"), unpatch_model, describe):
        with refused("Linear holds no transformers model"):
            act(nn.Linear(2, 2))


class Pipe:
    """As a pipeline: no module, with the model inside."""

    def __init__(self, model: Any) -> None:
        self.model = model


def test_no_module() -> None:
    for act in (lambda m: patch_model(m, "belief"), unpatch_model, describe):
        for name in ("bert-base-uncased", Path("bert-base-uncased")):
            with refused("loaded model", "from_pretrained('bert-base-uncased')"):
                act(name)
        with refused("got a Pipe around a BertForMaskedLM"):
            act(Pipe(fresh("bert")))
        with refused("the model must be a module"):
            act({})


def test_part_of_a_patched_model() -> None:
    model = patch_model(fresh("bert"), "belief")
    for act in (lambda m: patch_model(m, "belief"), unpatch_model, describe):
        with refused("part of a patched model", "call this on the whole model"):
            act(model.base_model)


def test_model_with_a_patched_part() -> None:
    model = fresh("bert")
    patch_model(model.base_model, "belief")
    for act in (lambda m: patch_model(m, "belief"), unpatch_model, describe):
        with refused(repr(model.base_model_prefix), "unpatch_model"):
            act(model)
    unpatch_model(model.base_model)
    patch_model(model, "belief")


def test_several_models_beside_each_other() -> None:
    both = nn.ModuleDict({"query": fresh("bert"), "answer": fresh("gpt2")})
    for act in (lambda m: patch_model(m, "belief"), unpatch_model, describe):
        with refused("ModuleDict holds several transformers models"):
            act(both)


@pytest.mark.parametrize(("strength", "other"), [(0.0, "sdpa"), (1.0, "eager")])
@pytest.mark.parametrize("family", DEEP)
def test_another_attention_chosen_after_patching(family: str, strength: float, other: str) -> None:
    model = patch_model(fresh(family), "belief", strength=strength)
    model.set_attn_implementation(other)
    with refused("is swapped", repr(other), "unpatch_model first"):
        forward(model, batch_of(family))
    model.set_attn_implementation(NAME)
    forward(model, batch_of(family))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_module_that_was_never_patched(family: str) -> None:
    model = fresh(family)
    model.set_attn_implementation(NAME)
    with refused("the config asks for 'hf_attn_swap'", "patch_model"):
        forward(model, batch_of(family))


@pytest.mark.parametrize("family", [name for name in FAMILY_NAMES if name not in ("bert", "albert")])
def test_called_around_its_hooks(family: str) -> None:
    """`module.forward(...)` skips the hooks that carry the call's context."""
    model = patch_model(fresh(family), "belief")
    core = next(m for m in model.modules() if getattr(m, "attn_swap", None) is not None)
    core.__call__ = core.forward
    hooks = dict(core._forward_pre_hooks)
    core._forward_pre_hooks.clear()
    with refused("its hooks did not run"):
        forward(model, batch_of(family))
    core._forward_pre_hooks.update(hooks)


def test_sizes_that_are_not_what_was_patched() -> None:
    model = patch_model(fresh("bert"), "belief")
    core = model.base_model.encoder.layer[0].attention.self
    core.attention_head_size *= 2
    with refused("was patched as", "cannot be swapped"):
        forward(model, batch_of("bert"))


def test_paged_cache() -> None:
    model = patch_model(fresh("llama"), "belief")
    cache = PagedAttentionCache.__new__(PagedAttentionCache)  # of continuous batching; its memory is not needed here
    x = torch.zeros(1, 3, model.config.hidden_size, dtype=torch.float64)
    for given in ({"cache": cache}, {"past_key_values": cache}, {"anything": cache}):
        with refused("paged cache", "PagedAttentionCache"):
            model.model.layers[0].self_attn(x, **given)


def test_model_that_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("bert")
    before, configs = model.config, {id(m.config) for m in model.modules() if hasattr(m, "config")}
    monkeypatch.setattr(model, "set_attn_implementation", lambda name: None)
    with refused("transformers does not let this model"):
        patch_model(model, "belief")
    assert model.config is before
    assert {id(m.config) for m in model.modules() if hasattr(m, "config")} == configs
    assert not swaps(model)
