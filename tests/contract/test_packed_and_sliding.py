"""Packed sequences equal separate ones, and a sliding window equals the same mask given by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests import reference, zoo
from tests.harness.places import one_per_place

from .cells import COMPOSED, COVERING, DEFAULT_CELLS, SINGLES, Cell, FamilyCell, over_in_turn, shown, swap_in
from .harness import CAUSAL_FAMILIES, TOLERANCE, assert_same, distance, forward, fresh, perturb, run_all, swaps

PIECES = (4, 3)
WINDOW, LONG = 3, 7
SLIDING = "mistral"


def packed_batch() -> dict[str, Tensor]:
    ids = zoo.inputs("gpt2", batch=2, length=sum(PIECES))["input_ids"]
    positions = torch.cat([torch.arange(piece) for piece in PIECES]).expand(2, -1)
    return {"input_ids": ids, "position_ids": positions}


def separately(model: Any) -> Tensor:
    parts = packed_batch()["input_ids"].split(PIECES, 1)
    return torch.cat([forward(model, {"input_ids": part}) for part in parts], 1)


def packs(family: str) -> bool:
    """Whether transformers builds the packed mask for this family: then every variant must honour it."""
    model = fresh(family)
    return distance(forward(model, packed_batch(), use_cache=False), separately(model)) < 1e-9


PACKING = [family for family in (*CAUSAL_FAMILIES, SLIDING) if packs(family)]


PACKED: tuple[FamilyCell, ...] = tuple(
    (family, cell) for family in PACKING for cell in (DEFAULT_CELLS if family == PACKING[0] else COVERING)
)


def test_some_families_pack() -> None:
    assert {"llama", SLIDING} <= set(PACKING)


@over_in_turn(PACKED, "strength", [1.0, 0.5], tuple(PACKING))
def test_packed_sequences_do_not_see_each_other(family: str, strength: float, cell: Cell) -> None:
    model = perturb(swap_in(fresh(family), cell[0], strength=strength, **cell[1]))
    batch = {**packed_batch(), "use_cache": False}
    assert distance(forward(model, batch), separately(model)) <= TOLERANCE[torch.float64]


def band() -> Tensor:
    """(B,1,Q,K) bool: the last WINDOW keys."""
    ones = torch.ones(LONG, LONG, dtype=torch.bool)
    return (ones.tril() & ones.triu(1 - WINDOW)).expand(2, 1, -1, -1)


@over_in_turn(
    tuple((SLIDING, cell) for cell in (*DEFAULT_CELLS, *(cell for _, cell in COMPOSED))),
    ("strength", "explicit"),
    [(0.5, False), (1.0, False), (0.0, False), (1.0, True)],
    (SLIDING,),
)
def test_sliding_window(family: str, cell: Cell, strength: float, explicit: bool) -> None:
    """Fused and explicit; simpletron counts the keys inside the window."""
    sliding, full = (
        perturb(swap_in(fresh(family, sliding_window=window), cell[0], strength=strength, **cell[1]))
        for window in (WINDOW, None)
    )
    ids = zoo.inputs(family, batch=2, length=LONG)["input_ids"]
    wanted = run_all(full, {"input_ids": ids, "attention_mask": band()}, output_attentions=explicit)
    assert_same(run_all(sliding, {"input_ids": ids}, output_attentions=explicit), wanted)
    assert distance(forward(full, {"input_ids": ids}), wanted[0]) > 1e-6


@over_in_turn(
    tuple((SLIDING, shown(name)) for name in one_per_place()),
    ("padded", "cache"),
    [
        (None, {}),
        ("left", {"cache_implementation": "static"}),
        ("left", {}),
        (None, {"cache_implementation": "static"}),
    ],
    (SLIDING,),
)
def test_generation_past_the_window(family: str, cell: Cell, padded: str | None, cache: dict[str, Any]) -> None:
    """A full sliding cache drops old keys: the token's own value is the last row then."""
    model = perturb(swap_in(fresh(family, sliding_window=4), cell[0]))
    model.generation_config.eos_token_id = None
    prompt = zoo.inputs(SLIDING, batch=2, length=6, padded=padded)
    prompt.setdefault("attention_mask", torch.ones_like(prompt["input_ids"]))
    want = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    uncached = model.generate(**prompt, **want, use_cache=False)
    cached = model.generate(**prompt, **want, **cache)
    assert torch.equal(cached.sequences, uncached.sequences)
    assert distance(torch.stack(cached.logits), torch.stack(uncached.logits)) <= TOLERANCE[torch.float64]


def mixed(*windows: bool) -> Any:
    """A stock Qwen2 with a sliding window in these layers; the weights are the same whatever the windows."""
    kinds = ["sliding_attention" if window else "full_attention" for window in windows]
    return zoo.build("qwen2", torch.float64, use_sliding_window=True, sliding_window=WINDOW, layer_types=kinds)


@over_in_turn(
    tuple(("qwen2", (name, {})) for name in SINGLES),
    ("padded", "strength"),
    [("left", 1.0), ("left", 0.5), (None, 1.0)],
    ("qwen2",),
)
def test_full_and_sliding_layers_in_one_model(family: str, cell: Cell, strength: float, padded: str | None) -> None:
    """Each layer is under its own mask, and takes no other layer's: the slow model, and the readable form, agree."""
    model = perturb(swap_in(mixed(False, True, False), cell[0], strength=strength, **cell[1]))
    own = [dict(swap.named_parameters()) for swap in swaps(model)]
    slow = reference.reference_model(mixed(False, True, False), cell[0], strength=strength, parameters=own)
    batch = {**zoo.inputs("qwen2", batch=2, length=LONG, padded=padded), "use_cache": False}
    if padded == "left":  # the pairs of a sink stand before the first seen token, and the slow model counts places
        batch["position_ids"] = (batch["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    wanted = run_all(slow, batch)
    for explicit in (False, True):
        got = run_all(model, batch, output_attentions=explicit)
        assert_same((got[0], {name: got[1][name] for name in wanted[1]}), wanted)
    everywhere = perturb(swap_in(mixed(False, False, False), cell[0], strength=strength, **cell[1]))
    assert distance(forward(everywhere, batch), wanted[0]) > 1e-4, "the window matters"
