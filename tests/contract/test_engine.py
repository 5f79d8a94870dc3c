"""An engine with an attention function of its own computes the heads, and the swap changes them; or it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM

from hf_attn_swap import patch_model
from hf_attn_swap.layer.swap import Swap
from hf_attn_swap.wiring import implementations, seam

from .harness import batch_of, distance, forward, fresh, perturb, refused

NAME = "an_engine"


def engine(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
    """Causal attention in rows (B * Q, H * D), as vLLM gives it."""
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
    heads = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    return heads.transpose(1, 2).flatten(0, 1).flatten(1), None


def no_scores(path: str, swap: Swap) -> None:
    """What this engine computes: variants that leave the scores alone."""
    if swap.places().carrier is not None or swap.at("normalizer") is not None:
        raise ValueError(f"{path}: this engine has no scores.")


@pytest.fixture
def _engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(implementations._CHECKS, NAME, None)  # taken out again after the test
    AttentionInterface.register(NAME, engine)
    seam.add_engine(NAME, no_scores)


def built(model: Any) -> Any:
    """The same model, built as an engine builds it: from its config, with the engine's attention function."""
    config = type(model.config).from_dict(model.config.to_dict())
    config._attn_implementation = NAME
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    made.load_state_dict(model.state_dict())
    return made


@pytest.mark.usefixtures("_engine")
@pytest.mark.parametrize("strength", [1.0, 0.4, 0.0])
@pytest.mark.parametrize("variant", ["belief", "belief_star", "gated"])
def test_the_heads_of_an_engine(variant: str, strength: float) -> None:
    model = perturb(patch_model(fresh("llama"), variant, strength=strength))
    batch = batch_of("llama")
    made = built(model)
    assert distance(forward(made, batch), forward(model, batch)) <= 1e-6  # angles are worked out in another dtype
    assert made.config._attn_implementation == NAME
    assert made.config.attn_implementation == implementations.NAME  # what a save writes


@pytest.mark.usefixtures("_engine")
def test_what_the_engine_cannot_compute() -> None:
    for variant in ("outeffhop", "modern_hopfield"):
        with refused("layers.0.self_attn: this engine has no scores"):
            built(patch_model(fresh("llama"), variant))


@pytest.mark.usefixtures("_engine")
def test_each_module_asks_once() -> None:
    made = built(patch_model(fresh("llama"), "belief"))
    core = made.model.layers[1].self_attn
    core.forward = lambda hidden_states, **_: (hidden_states, None)
    with refused("layers.1.self_attn: the forward of", "0 times instead of once"):
        forward(made, batch_of("llama"))


def test_an_engine_that_is_not_accepted() -> None:
    AttentionInterface.register("another_engine", engine)
    model = patch_model(fresh("llama"), "belief")
    config = copy.deepcopy(model.config)
    config._attn_implementation = "another_engine"
    with refused("cannot run with attn_implementation='another_engine'"):
        AutoModelForCausalLM.from_config(config)
    with pytest.raises(KeyError, match="no_engine"):
        seam.add_engine("no_engine", no_scores)
