"""Every variant in every program that is recorded from a model: on longer texts than the example, right or refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hf_attn_swap import list_variants, patch_model
from hf_attn_swap.functional.linear import CHUNK
from hf_attn_swap.layer.registry import tiny_options
from tests import zoo
from tests.contract.harness import TOLERANCE, distance, padding_side, perturb
from tests.harness.places import one_per_place, turns

from .table import PROGRAMS, Logits

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the exporters
EXAMPLE = 2  # as short as the shortest window of the tiny options
LENGTHS = (12, CHUNK + 7)
FAMILIES = ("llama", "bert")  # causal with a cache and groups of heads; in both directions, with absolute places
FAST = set(turns(list(PROGRAMS), one_per_place()))
CELLS = [  # the families take turns
    pytest.param(
        *(family, program, variant),
        marks=() if program != "compiled" and (program, variant) in FAST and family == turn else pytest.mark.slow,
    )
    for program in PROGRAMS
    for variant, turn in zip(list_variants(), itertools.cycle(FAMILIES))
    for family in FAMILIES
]


def batch_of(family: str, length: int) -> tuple[Tensor, Tensor]:
    """Token ids and a mask; the first row has two tokens less, if the text is long enough."""
    made = zoo.inputs(family, batch=3, length=length, padded=padding_side(family) if length > EXAMPLE else None)
    return made["input_ids"], made.get("attention_mask", torch.ones_like(made["input_ids"]))


@pytest.mark.parametrize(("family", "program", "variant"), CELLS)
@torch.no_grad()
def test_right_or_refused(family: str, program: str, variant: str) -> None:
    model = zoo.build(family, num_hidden_layers=2, max_position_embeddings=2 * CHUNK)
    perturb(patch_model(model, variant, **tiny_options(variant))).eval()
    run = PROGRAMS[program](model, *batch_of(family, EXAMPLE))
    for length in LENGTHS:
        ids, mask = batch_of(family, length)
        wanted = Logits(model)(ids, mask)[mask.bool()]
        try:
            got = run(ids, mask)
        except ValueError as refusal:
            assert "use" in str(refusal), "a refusal says what to do"  # noqa: PT017  # right, or refused
            return
        assert distance(got[mask.bool()], wanted) <= TOLERANCE[torch.float32]
