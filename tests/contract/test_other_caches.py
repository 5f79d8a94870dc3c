"""Generation with an offloaded or quantised cache equals generation without a cache, for every variant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import QuantizedLayer

from benchmarks.bench_caches import with_cache
from tests.harness.generation import assert_equal_generation, model_of, prompt_of

from .cells import WIDE, Cell, over, over_in_turn
from .harness import CAUSAL_FAMILIES


class Kept(QuantizedLayer):
    """A backend that rounds nothing: everything else is as transformers quantises keys and values."""

    calls = 0

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        Kept.calls += 1
        return tensor.clone()

    def _dequantize(self, tensor: Tensor) -> Tensor:
        return tensor.clone()


class Away(DynamicCache):
    """Offloading without the streams of a GPU: a layer is elsewhere except while it is updated."""

    moves = 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        Away.moves += 1
        self.layers[layer_idx].prefetch()
        given = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.layers[layer_idx].offload()
        return given


@over_in_turn(WIDE, "padded", [None, "left"], CAUSAL_FAMILIES)
def test_quantised(family: str, cell: Cell, padded: str | None) -> None:
    """Of the prompt's end and the new tokens, some are in the quantised part and some beside it."""
    model = model_of(family, cell)
    before = Kept.calls
    cache = Cache(layers=[Kept(residual_length=3) for _ in range(model.config.num_hidden_layers)])
    assert_equal_generation(model, prompt_of(family, padded), with_cache(model, cache))
    assert Kept.calls - before > 2 * model.config.num_hidden_layers  # of keys and values: more than the prompt's


@over(WIDE, CAUSAL_FAMILIES)
def test_offloaded(family: str, cell: Cell) -> None:
    model = model_of(family, cell)
    before = Away.moves
    assert_equal_generation(model, prompt_of(family, "left"), with_cache(model, Away(config=model.config)))
    assert Away.moves > before


@over_in_turn(WIDE, "implementation", ["offloaded", "offloaded_static"], ("llama",))
@pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers' offloading uses the streams of a GPU")
def test_offloaded_by_name(family: str, cell: Cell, implementation: str) -> None:
    model = model_of(family, cell).to("cuda")
    prompt = {name: tensor.to("cuda") for name, tensor in prompt_of(family, "left").items()}
    assert_equal_generation(model, prompt, {"cache_implementation": implementation})
