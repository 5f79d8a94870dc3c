"""PEFT beyond adapters: prefix tuning in the families that read a cache."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from benchmarks.bench_caches import cache_of
from hf_attn_swap import patch_model
from tests import zoo
from tests.contract.cells import FAMILY_NAMES, composes
from tests.contract.harness import batch_of, distance, forward, fresh, perturb, refused
from tests.harness.places import one_per_place, turns

# PEFT 0.21 reads a property that transformers 5.23 has renamed
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
# PEFT 0.21 hands the prefix over by the name that the cache had before transformers 5.24
GIVEN_BY_ITS_OLD_NAME = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
PREFIX, LENGTH = 3, 9  # tokens
CAUSAL = [name for name in FAMILY_NAMES if name in zoo.CAUSAL]


def prefixed(model: Any, name: str, keys_and_values: Tensor) -> Any:
    """A model with a prefix of these keys and values: (layer, 2, head, token, width), the same for every text."""
    task = "CAUSAL_LM" if name in zoo.CAUSAL else "FEATURE_EXTRACTION"
    tokens = keys_and_values.shape[3]
    with torch.random.fork_rng():
        wrapper = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=tokens))
    weight = wrapper.prompt_encoder["default"].embedding.weight
    weight.data = keys_and_values.permute(3, 0, 1, 2, 4).reshape(tokens, -1)
    return wrapper.eval()


@GIVEN_BY_ITS_OLD_NAME
@pytest.mark.parametrize(("name", "variant"), turns(CAUSAL, one_per_place()))
def test_a_prefix_of_real_tokens(name: str, variant: str) -> None:
    """The keys and values of the first tokens, given as a prefix, are as good as these tokens."""
    model = perturb(patch_model(fresh(name), variant))
    ids = zoo.inputs(name, batch=2, length=LENGTH)["input_ids"]
    ids[1, :PREFIX] = ids[0, :PREFIX]
    cache = cache_of(model(input_ids=ids[:1, :PREFIX], use_cache=True))  # with gradients: keys and values
    read = torch.stack([torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]).detach()
    got = forward(prefixed(model, name, read), {"input_ids": ids[:, PREFIX:]})
    wanted = forward(model, {"input_ids": ids})[:, PREFIX:]
    assert distance(got, wanted) <= 1e-10
    assert distance(forward(model, {"input_ids": ids[:, PREFIX:]}), wanted) > 1e-4


@GIVEN_BY_ITS_OLD_NAME
@pytest.mark.parametrize("variant", [name for name in one_per_place() if composes((name, "outeffhop"))])
def test_a_prefix_of_zeros_on_an_encoder(variant: str) -> None:
    """One key and value of zeros adds 1 to the softmax's denominator, as `outeffhop` does."""
    batch = zoo.inputs("bert", batch=2, length=LENGTH, padded="right")
    model = perturb(patch_model(fresh("bert"), variant))
    zeros = torch.zeros(zoo.LAYERS, 2, zoo.HEADS, 1, zoo.HIDDEN // zoo.HEADS, dtype=torch.float64)
    got = forward(prefixed(model, "bert", zeros), batch)
    both = patch_model(fresh("bert"), f"outeffhop+{variant}")
    both.load_state_dict(model.state_dict())
    later = torch.arange(1, LENGTH + 1).expand(2, -1)  # the prefix takes position 0
    assert distance(got, forward(both, {**batch, "position_ids": later})) <= 1e-10


def test_no_prefix_without_a_cache() -> None:
    """ALBERT reads no cache; stock attention fails on the size of the mask."""
    zeros = torch.zeros(zoo.LAYERS, 2, zoo.HEADS, PREFIX, zoo.HIDDEN // zoo.HEADS, dtype=torch.float64)
    with refused("AlbertAttention reads no cache", "LoRA"):
        prefixed(patch_model(fresh("albert"), "outeffhop"), "albert", zeros)(**batch_of("albert"))
