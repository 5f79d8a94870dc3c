"""`torch.compile(dynamic=True)`: one graph for two lengths, equal to the model as it is."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from hf_attn_swap import list_variants, patch_model
from hf_attn_swap.variants.base import VARIANTS
from tests import zoo
from tests.contract.cells import DEEP
from tests.contract.harness import TOLERANCE, distance, forward, fresh, padding_side, perturb

FAST = next(name for name in list_variants() if VARIANTS[name].replaces)  # the variant whose length enters a formula
EVERY = [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in list_variants()]


@pytest.mark.parametrize("family", DEEP)
@pytest.mark.parametrize("variant", EVERY)
def test_one_graph_for_two_lengths(family: str, variant: str) -> None:
    torch.compiler.reset()
    model = perturb(patch_model(fresh(family, num_hidden_layers=2), variant))
    counter = CompileCounter()
    compiled = torch.compile(model, dynamic=True, fullgraph=True, backend=counter)
    graphs = []
    for length in (7, 12):
        batch = zoo.inputs(family, batch=2, length=length, padded=padding_side(family))
        asked = {"use_cache": False} if family in zoo.CAUSAL else {}
        got, wanted = forward(compiled, batch, **asked), forward(model, batch, **asked)
        assert distance(got, wanted) <= TOLERANCE[torch.float64]
        graphs.append(counter.frame_count)
    assert graphs == [1, 1]
