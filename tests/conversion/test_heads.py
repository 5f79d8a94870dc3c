"""Matched heads are the same model with its weights exchanged head by head, and the order found is the best one."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from hf_attn_swap import describe, patch_model, set_strength, unpatch_model
from hf_attn_swap.conversion import calibrate, heads, match_heads
from hf_attn_swap.core.call import heads_in_order
from hf_attn_swap.families import sites
from hf_attn_swap.kernels import carried, dispatch, hopfield
from hf_attn_swap.layer.calibration import MergedCalibration
from hf_attn_swap.layer.head_order import MatchedHeads
from hf_attn_swap.layer.registry import parse, parse_options
from hf_attn_swap.layer.swap import Swap
from tests import reference
from tests.contract.cells import COMPOSITIONS, DEFAULT_CELLS, EXTRA_CELLS, FAMILY_NAMES, Cell, label, swap_in
from tests.contract.harness import (
    CAUSAL_FAMILIES,
    LENGTH,
    assert_identical,
    assert_same,
    batch_of,
    distance,
    forward,
    fresh,
    padding_side,
    perturb,
    refused,
    run,
    run_all,
    swaps,
)
from tests.generic import harness as generic
from tests.harness.checkpointing import ABLE, enable
from tests.harness.generation import assert_equal_generation, prompt_of
from tests.weights import checkpoints

from .geometry import SIZES
from .left_behind import modes_and_hooks

DTYPES = (torch.float32, torch.bfloat16)
ORDERS = ((1, 2, 3, 0), (2, 0, 1, 3), (3, 2, 0, 1))  # none is its own inverse
ONE_MODULE = ("albert",)
NUMBERED = [name for name in FAMILY_NAMES if name not in ONE_MODULE]
TOLERANCE = 1e-12  # docs/mathematics.md, section Strength and exactness


def carries(cell: Cell) -> bool:
    classes = parse(cell[0])
    return Swap(classes, parse_options(classes, cell[1]), SIZES).carries


CARRYING = [cell for cell in (*DEFAULT_CELLS, *EXTRA_CELLS) if carries(cell)]
COMPOSED = [(name, {}) for name in COMPOSITIONS if carries((name, {}))]
MHA = next(cell[0] for cell in CARRYING)


def put(model: Any, orders: Any = ORDERS) -> Any:
    """A patched model whose layers have these orders."""
    for swap, order in zip(swaps(model), itertools.cycle(orders), strict=False):
        swap.put(MatchedHeads(order)) if order else swap.drop(MatchedHeads.name)
    return set_strength(model, swaps(model)[0].strength)  # writes the config anew


def orders(model: Any) -> list[tuple[int, ...] | None]:
    return [None if swap.head_order is None else swap.head_order.order for swap in swaps(model)]


def in_config(model: Any) -> list[list[int] | None]:
    """The order in the config's block, layer by layer."""
    found = {i: entry.get("head_order") for entry in model.config.attn_swap["swaps"] for i in entry["layers"]}
    return [found[index] for index in sorted(found)]


def several(name: str, dtype: torch.dtype = torch.float64, **more: Any) -> list[dict[str, Any]]:
    """More tokens than a map has unknowns."""
    return [batch_of(name, dtype, seed=seed, **more) for seed in range(12)]


# ---- The same function as other weights, or as the formula with the heads of S exchanged


def exchange(model: Any, chosen: Any = ORDERS) -> Any:
    """Exchange the weights of a stock model head by head: place h of a layer gets head order[h]."""
    done = set()
    for site, order in zip(sites(model), itertools.cycle(chosen), strict=False):
        family, width = site.family, site.family.geometry(site.core).head_dim
        index = (torch.tensor(order)[:, None] * width + torch.arange(width)).flatten()
        for path in dict.fromkeys((family.query, family.key, family.value)):
            module = site.core.get_submodule(path)
            columns = index
            if family.query == family.key:  # one matrix holds query, key and value side by side
                columns = torch.cat([index + part * len(index) for part in range(3)])
            by_output(module, columns)
        output = site.container.get_submodule(family.output)
        axis = 1 if isinstance(output, nn.Linear) else 0
        output.weight.data = output.weight.data.index_select(axis, index)
        done.add(id(output))
    assert done
    return model


def by_output(module: Any, index: Tensor) -> None:
    """Exchange the outputs of a projection. A Conv1D holds its weight the other way round."""
    axis = 0 if isinstance(module, nn.Linear) else 1
    module.weight.data = module.weight.data.index_select(axis, index)
    if module.bias is not None:
        module.bias.data = module.bias.data[index]


def ungrouped(name: str, dtype: torch.dtype) -> Any:
    """The family's model; with a key/value head of its own for each query head where they were shared."""
    stock = fresh(name, dtype)
    kv_heads = getattr(stock.config, "num_key_value_heads", None)
    if kv_heads is None:
        return stock
    count = stock.config.num_attention_heads // kv_heads
    model = fresh(name, dtype, num_key_value_heads=stock.config.num_attention_heads)
    model.load_state_dict(
        {
            key: value.unflatten(0, (kv_heads, -1)).repeat_interleave(count, 0).flatten(0, 1)
            if "k_proj" in key or "v_proj" in key
            else value
            for key, value in stock.state_dict().items()
        }
    )
    return model


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_the_same_model_with_exchanged_weights(name: str, strength: float) -> None:
    """Up to the order of sums; and the exchange alone leaves the stock model as it is."""
    chosen = ORDERS[:1] if name in ONE_MODULE else ORDERS
    batch = batch_of(name, padded=padding_side(name))
    by_hand = exchange(ungrouped(name, torch.float64), chosen)
    assert distance(forward(by_hand, batch), forward(fresh(name), batch)) <= TOLERANCE
    wanted = forward(patch_model(by_hand, MHA, strength=strength), batch)
    model = patch_model(fresh(name), MHA, strength=strength)
    plain = forward(model, batch)
    assert distance(forward(put(model, chosen), batch), wanted) <= TOLERANCE
    assert (distance(plain, wanted) > 1e-3) == (name not in ONE_MODULE), "the heads of one module match by number"


def formula(name: str, cell: Cell, model: Any, strength: float) -> Any:
    """The slow reference model; the scores of each layer are put in order before the formula, and back after."""
    own = [dict(swap.named_parameters()) for swap in swaps(model)]
    slow = reference.reference_model(fresh(name), cell[0], options=cell[1], strength=strength, parameters=own)
    layers = [module for module in slow.modules() if isinstance(module, reference.SlowLayer)]
    for layer, order in zip(layers, orders(model), strict=True):
        layer.hopfield = exchanged(layer.hopfield, list(order or range(4)))
    return slow


def exchanged(carry: Callable[[Tensor], Tensor], order: list[int]) -> Callable[[Tensor], Tensor]:
    back = [order.index(head) for head in range(len(order))]
    return lambda scores: carry(scores[:, order])[:, back]


def equals_formula(name: str, cell: Cell, strength: float, batch: dict[str, Any]) -> None:
    """In values and gradients, with the fused form and with the readable one; and another model than by number."""
    model = perturb(swap_in(fresh(name), cell[0], strength=strength, **cell[1]))
    plain = forward(model, batch)
    put(model)
    wanted = run_all(formula(name, cell, model, strength), batch)
    got = run_all(model, batch)
    assert_same((got[0], {key: got[1][key] for key in wanted[1]}), wanted)
    for more in ({}, {"output_attentions": True}):
        assert distance(forward(model, batch, **more), wanted[0]) <= TOLERANCE
    assert distance(plain, wanted[0]) > 1e-6


FORMULAS = [
    *((name, (MHA, {}), 1.0) for name in NUMBERED),
    *(("llama", cell, 1.0) for cell in CARRYING[1:]),
    ("bert", (MHA, {}), 0.5),
    ("bert", COMPOSED[0], 0.5),
]
MORE_FORMULAS = [
    *((name, cell, 0.5) for name in ("bert", "vit") for cell in CARRYING[1:]),
    *((name, cell, strength) for name in ("llama", "gpt2") for cell in COMPOSED for strength in (1.0, 0.5)),
]


def named(cases: list[tuple[Any, ...]], *marks: Any) -> list[Any]:
    """Test parameters whose ids hold the cells in words."""
    return [
        pytest.param(
            *case, id="-".join(label(part) if isinstance(part, tuple) else str(part) for part in case), marks=marks
        )
        for case in cases
    ]


@pytest.mark.parametrize(("name", "cell", "strength"), [*named(FORMULAS), *named(MORE_FORMULAS, pytest.mark.slow)])
def test_the_formula_with_exchanged_heads(name: str, cell: Cell, strength: float) -> None:
    equals_formula(name, cell, strength, batch_of(name, padded=padding_side(name)))


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("first", [None, ORDERS[0]], ids=["from the second layer on", "everywhere"])
def test_a_mask_of_its_own_for_each_head(name: str, first: Any) -> None:
    """The mask belongs to the layer's own heads, and H below may hold no mask in another order."""
    generator = torch.Generator().manual_seed(8)
    mask = torch.rand(2, 4, LENGTH, LENGTH, generator=generator) < 0.6
    mask = (mask | torch.eye(LENGTH, dtype=torch.bool)).tril()
    batch = {**batch_of(name), "attention_mask": mask}
    model = put(patch_model(fresh(name), MHA), (first, *ORDERS[1:]))
    wanted = run_all(formula(name, (MHA, {}), model, 1.0), batch)
    assert_same(run_all(model, batch), wanted)
    with torch.no_grad():
        assert distance(model(**batch)[0], wanted[0]) <= TOLERANCE


@pytest.mark.parametrize("name", ["gemma2", "t5"])
def test_a_soft_cap_or_a_position_bias(name: str) -> None:
    """A bias differs from head to head: it belongs to the scores, and moves with them."""
    if not generic.behind_the_interface(name):
        pytest.skip("this transformers computes its attention in its own code")
    dtype = generic.dtype_of(name)
    batch = generic.batch_of(name, dtype)
    model = patch_model(generic.build(name), MHA)
    plain = forward(model, batch)
    got = forward(put(model), batch)
    for swap in swaps(model):
        order, carry = list(swap.head_order.order), swap.at("scores").carry
        back = [order.index(head) for head in range(4)]
        swap.drop(MatchedHeads.name)
        swap.at("scores").carry = lambda scores, call, carry=carry, order=order, back=back: carry(
            scores[:, order], call
        )[:, back]
    assert distance(got, forward(model, batch)) <= (TOLERANCE if dtype == torch.float64 else 1e-5)
    assert distance(got, plain) > 1e-6


# ---- Strength 0, forms, caches


@pytest.mark.parametrize("name", FAMILY_NAMES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_stock_model_stays(name: str, dtype: torch.dtype) -> None:
    """Strength 0 and the unpatched model, in values and gradients, and every weight: to the bit."""
    batch, stock = batch_of(name, dtype, padded=padding_side(name)), fresh(name, dtype)
    wanted = run(stock, batch)
    model = patch_model(fresh(name, dtype), MHA)
    match_heads(model, batch, progress=False)
    assert_identical(run(set_strength(model, 0.0), batch), wanted)
    assert in_config(model)[1:] == [None if each is None else list(each) for each in orders(model)][1:]
    assert_identical(run(unpatch_model(model), batch), wanted)
    assert not hasattr(model.config, "attn_swap")
    for key, value in stock.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.parametrize("name", NUMBERED)
def test_fused_equals_reference(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the fused form is what runs, with gradients and without."""
    ran: list[bool] = []
    attend = carried.attend

    def counted(*args: Any) -> Tensor | None:
        heads = attend(*args)
        ran.append(heads is not None)
        return heads

    model, batch = put(patch_model(fresh(name), MHA)), batch_of(name, padded=padding_side(name))
    wanted = run_all(model, batch, output_attentions=True)
    shown = forward(model, batch, output_attentions=True)
    monkeypatch.setattr(carried, "attend", counted)
    assert_same(run_all(model, batch), wanted)
    assert distance(forward(model, batch), shown) <= TOLERANCE
    assert ran == [True] * 2 * len(swaps(model))


@pytest.mark.parametrize("name", ["bert", "llama", "gpt2"])
@pytest.mark.parametrize("padded", [None, "left"])
def test_long_sequences(name: str, padded: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = put(patch_model(fresh(name), MHA)), batch_of(name, padded=padded)
    wanted, read = run_all(model, batch), forward(model, batch)
    calls = []
    in_blocks = hopfield.attend_long
    monkeypatch.setattr(dispatch, "LONG", LENGTH)
    monkeypatch.setattr(hopfield, "attend_long", lambda *args: calls.append(1) or in_blocks(*args))
    assert_same(run_all(model, batch), wanted)
    assert distance(forward(model, batch), read) <= TOLERANCE
    assert len(calls) == 2 * len(swaps(model))


@pytest.mark.parametrize("name", CAUSAL_FAMILIES)
@pytest.mark.parametrize("padded", [None, "left"])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_generation(name: str, padded: str | None, cache: dict[str, Any]) -> None:
    model = put(patch_model(fresh(name), MHA))
    model.generation_config.eos_token_id = None
    assert_equal_generation(model, prompt_of(name, padded), cache)


@pytest.mark.parametrize("name", [name for name in ABLE if name not in ONE_MODULE])
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_activation_checkpointing(name: str, strength: float) -> None:
    model = put(patch_model(fresh(name), MHA, strength=strength)).train()
    batch = batch_of(name) | ({"use_cache": False} if name in CAUSAL_FAMILIES else {})
    torch.manual_seed(0)
    wanted = run_all(model, batch)
    enable(model, activation_checkpointing_kwargs={"use_reentrant": False})
    torch.manual_seed(0)
    assert_same(run_all(model, batch), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("strength", [1.0, 0.4])
def test_compiled(name: str, strength: float) -> None:
    torch._dynamo.reset()
    model = put(patch_model(fresh(name, torch.float32, num_hidden_layers=2), MHA, strength=strength))
    batch = batch_of(name, torch.float32)
    wanted = run_all(model, batch)
    got = run_all(torch.compile(model, backend="aot_eager", fullgraph=True), batch)
    torch._dynamo.reset()
    assert_same((got[0], {key.removeprefix("_orig_mod."): value for key, value in got[1].items()}), wanted, slack=3)


def test_groups_are_repeated_in_order() -> None:
    """Head h reads the key/value head h // 2 of its group."""
    tensor = torch.arange(2.0)[None, :, None, None].expand(1, 2, 3, 5)
    assert heads_in_order(tensor, (3, 0, 1, 2))[0, :, 0, 0].tolist() == [1, 0, 0, 1]
    assert heads_in_order(torch.arange(8).view(2, 4), (3, 0, 1, 2)).tolist() == [[3, 0, 1, 2], [7, 4, 5, 6]]


# ---- Saved, loaded, copied


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, batch = patch_model(fresh(name, torch.float32), MHA, strength=0.7), batch_of(name, torch.float32)
    put(model, ORDERS[:1] if name in ONE_MODULE else ORDERS)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert orders(loaded) == orders(model) == [None if each is None else tuple(each) for each in in_config(loaded)]
    assert None not in orders(loaded)
    assert loaded.config.attn_swap == model.config.attn_swap
    assert torch.equal(forward(loaded, batch), forward(model, batch))
    assert torch.equal(forward(unpatch_model(loaded), batch), forward(fresh(name, torch.float32), batch))


DAMAGED = [
    *(([0, 1, 2], "head_order must name 4 heads, got 3"), ([], "head_order must name 4 heads, got 0")),
    *((value, "head_order must name every head once") for value in ([0, 1, 2, 2], [0, 1, 2, 4], [0, 1, 2, -1])),
    *((value, "head_order must name every head once") for value in ([False, True, 2, 3], ["0", "1", "2", "3"])),
    *((value, "head_order must name every head once") for value in ([0.0, 1.0, 2.0, 3.0], [[0], [1], [2], [3]])),
    *((value, "head_order must name every head once") for value in ("3210", {"0": 1}, None, True, 3, [None] * 4)),
    (list(range(10**4, 0, -1)), "head_order must name every head once"),
]


@pytest.mark.parametrize(("value", "reason"), DAMAGED, ids=[str(value)[:20] for value, _ in DAMAGED])
def test_damaged(value: Any, reason: str, tmp_path: Path) -> None:
    model = put(patch_model(fresh("bert", torch.float32), MHA))
    model.config.attn_swap["swaps"][1]["head_order"] = value
    model.config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason) as caught:
        type(model)(AutoConfig.from_pretrained(tmp_path))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_copies_keep_it_and_a_second_swap_loses_it() -> None:
    batch = batch_of("llama", torch.float32)
    model = put(patch_model(fresh("llama", torch.float32), MHA))
    wanted = forward(model, batch)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(forward(twin, batch), wanted)
        assert orders(twin) == list(ORDERS)
        put(twin, ORDERS[::-1])
        assert not torch.equal(forward(twin, batch), wanted)
    assert torch.equal(forward(model, batch), wanted)
    assert describe(model).rows[1].runs.endswith("heads matched to the carried scores")
    patch_model(model, MHA, layers=[1])
    assert orders(model) == [ORDERS[0], None, ORDERS[2]]
    assert not describe(model).rows[1].runs.endswith("heads matched to the carried scores")
    unpatch_model(model)
    assert orders(patch_model(model, MHA)) == [None] * 3


# ---- The order that is found


def echo(name: str, order: tuple[int, ...], **more: Any) -> Any:
    """A model whose layer 1 is layer 0 with its heads exchanged, on the same input: what layer 0 adds is nothing."""
    model = fresh(name, **more)
    layers = model.model.layers
    layers[1].load_state_dict(layers[0].state_dict())
    for module in (layers[0].self_attn.o_proj, layers[0].mlp.down_proj):
        nn.init.zeros_(module.weight)
    same = tuple(range(len(order)))
    return exchange(model, (same, order, *[same] * (len(layers) - 2)))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
@pytest.mark.parametrize("options", [{}, {"init": "first"}, {"scheme": "forward_forward"}], ids=str)
def test_a_known_order_is_found(order: tuple[int, ...], options: dict[str, Any]) -> None:
    model = echo("llama", order, num_key_value_heads=4, num_hidden_layers=2)
    swap_in(model, MHA, **options)
    found = match_heads(model, several("llama", padded="left")[:3], progress=False)
    assert found.orders == {1: tuple(order.index(head) for head in range(4))}
    assert orders(model) == [None, found.orders[1]]
    assert in_config(model) == [None, list(found.orders[1])]
    assert found.after == pytest.approx(1)
    assert (found.before < 0.9) == (order != (0, 1, 2, 3))
    assert f"{found.before:.2f} by number, 1.00 now" in str(found)


def stock_scores(name: str, batch: dict[str, Any]) -> list[Tensor]:
    """The scores of every layer of the stock model, less the mean over the keys that may be seen; 0 elsewhere."""
    found = []
    for scores in projected(fresh(name), batch)[0]:
        seen = torch.ones_like(scores, dtype=torch.bool)
        seen = seen.tril() if name in CAUSAL_FAMILIES else seen
        if "attention_mask" in batch:
            real = batch["attention_mask"].bool()
            seen = seen & real[:, None, None, :] & real[:, None, :, None]
        mean = (scores * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
        found.append((scores - mean) * seen)
    return found


def best(scores: list[Tensor], options: Any) -> tuple[list[tuple[int, ...]], float, float]:
    """By trying every order of every layer: the orders, and the mean correlation by number and in these orders."""
    share, first = options.alpha_prime, options.init == "first"
    start = scores[0] if first else torch.zeros_like(scores[0])
    below = plain = share * start + (1 - share) * scores[0]
    chosen, before, after = [], [], []
    for own in scores[1:]:
        tried = {order: float((own[:, order] * below).sum()) for order in itertools.permutations(range(own.shape[1]))}
        chosen.append(max(tried, key=tried.__getitem__))
        before.append(correlation(own, plain))
        after.append(correlation(own[:, chosen[-1]], below))
        below = share * below + (1 - share) * own[:, chosen[-1]]
        plain = share * plain + (1 - share) * own
    return chosen, sum(before) / len(before), sum(after) / len(after)


def correlation(one: Tensor, other: Tensor) -> float:
    pairs = zip(one.transpose(0, 1).flatten(1), other.transpose(0, 1).flatten(1), strict=True)
    found = [float(left @ right / (left.norm() * right.norm())) for left, right in pairs]
    return sum(found) / len(found)


@pytest.mark.parametrize(
    ("name", "cell"),
    [
        *named([(name, CARRYING[0]) for name in NUMBERED]),
        *named([("llama", cell) for cell in CARRYING[1:]]),
        *named([(name, cell) for name in NUMBERED if name != "llama" for cell in CARRYING[1:]], pytest.mark.slow),
    ],
)
def test_the_best_of_all_orders(name: str, cell: Cell) -> None:
    """On random weights, with padding: by trying all 24 orders of each layer."""
    batch = batch_of(name, padded=padding_side(name))
    model = swap_in(fresh(name), cell[0], strength=0.3, **cell[1])
    options = swaps(model)[0].at("scores").options
    found = match_heads(model, batch, progress=False)
    if options.alpha_prime == 1 and options.init == "zero":
        return  # H is 0 everywhere, so all orders are equal
    chosen, before, after = best(stock_scores(name, batch), options)
    assert list(found.orders.values()) == chosen
    assert found.before == pytest.approx(before, abs=1e-5)
    assert found.after == pytest.approx(after, abs=1e-5)
    assert found.after > found.before
    assert len(set(chosen)) > 1


@pytest.mark.weights
@pytest.mark.parametrize("name", [checkpoints.needs(name) for name in ("stories260k", "minilm")])
def test_real_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every layer the sum of products is at least that by number, and a gain then explains more of the heads."""
    sums: list[tuple[float, float]] = []
    assign = heads.assign

    def watched(own: list[Tensor], below: list[Tensor], index: int) -> tuple[int, ...]:
        order = assign(own, below, index)
        pairs = list(zip(own, below, strict=True))
        sums.append(tuple(sum(float((s[:, each] * h).sum()) for s, h in pairs) for each in (range(len(order)), order)))
        return order

    batch = checkpoints.inputs(name)
    model = patch_model(checkpoints.fresh(name), MHA)
    monkeypatch.setattr(heads, "assign", watched)
    found = match_heads(model, batch, progress=False)
    assert list(found.orders) == list(range(1, len(swaps(model))))
    assert all(sorted(order) == list(range(len(order))) for order in found.orders.values())
    assert len(sums) == len(found.orders)
    assert all(before <= after for before, after in sums)
    assert found.after > found.before + 0.1
    assert explained(name, batch, True) > explained(name, batch, False) + 0.05


def explained(name: str, batch: dict[str, Tensor], match: bool) -> float:
    """R^2 of a gain per head, the mean over heads and layers."""
    model = patch_model(checkpoints.fresh(name), MHA)
    report = calibrate(model, batch, fit="gain", match=match, progress=False)
    found = [value for layer in report.layers for value in layer.after]
    return sum(found) / len(found)


def test_the_first_rows_and_tokens_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of two rows are read until there are four; other rows and later tokens change nothing."""
    model = patch_model(fresh("llama"), MHA)
    batches = several("llama")
    wanted = match_heads(model, batches[:2], progress=False)
    read: list[int] = []
    assert match_heads(model, (read.append(1) or each for each in batches), progress=False) == wanted
    assert len(read) == 2
    joined = {"input_ids": torch.cat([each["input_ids"] for each in batches])}
    assert match_heads(model, joined, progress=False).after == pytest.approx(wanted.after)
    monkeypatch.setattr(heads, "TOKENS", 4)
    short = match_heads(model, batches[:2], progress=False)
    assert short == match_heads(model, [{"input_ids": each["input_ids"][:, :4]} for each in batches[:2]])
    assert short != wanted


# ---- Which layers


def test_a_second_match_starts_anew() -> None:
    """An order of before does not stay where a layer has become the first, and is not matched against."""
    model = put(patch_model(fresh("llama"), MHA))
    batches = several("llama")[:2]
    match_heads(model, batches, progress=False)
    assert orders(model)[0] is None
    alone = patch_model(fresh("llama"), MHA, layers=[1, 2])
    wanted = match_heads(alone, batches, progress=False)
    assert list(wanted.orders) == [2]
    patch_model(model, "belief", layers=[0])
    assert orders(model)[1] is not None
    assert match_heads(model, batches, progress=False) == wanted, "the scores are those of the stock model"
    assert orders(model) == [None, None, wanted.orders[2]]


@pytest.mark.parametrize("name", ["whisper_whole", "t5"])
def test_each_stack_starts_anew(name: str) -> None:
    """Also if the layers of both stacks see as many tokens."""
    if not generic.behind_the_interface(name):
        pytest.skip("this transformers computes attention in the model's own code")
    model, batch = patch_model(generic.build(name), MHA), generic.batch_of(name)
    if "input_ids" in batch:
        batch["decoder_input_ids"] = batch["input_ids"]
    set_strength(model, 0.0)
    stock = forward(model, batch)
    found = match_heads(model, batch, progress=False)
    count = len(swaps(model)) // 2
    assert list(found.orders) == [*range(1, count), *range(count + 1, 2 * count)]
    assert [each is None for each in orders(model)] == [index % count == 0 for index in range(2 * count)]
    assert found.after > found.before
    assert torch.equal(forward(model, batch), stock)
    assert torch.isfinite(forward(set_strength(model, 1.0), batch)).all()


@pytest.mark.parametrize("layers", [[0], [2]])
def test_one_layer_has_nothing_to_match(layers: list[int]) -> None:
    found = match_heads(patch_model(fresh("llama"), MHA, layers=layers), batch_of("llama"), progress=False)
    assert found.orders == {}
    assert math.isnan(found.before)
    assert math.isnan(found.after)
    assert "No layer has heads to match" in str(found)


@pytest.mark.parametrize("name", ONE_MODULE)
def test_one_module_for_all_layers_keeps_its_heads(name: str) -> None:
    model, batches = patch_model(fresh(name), MHA), several(name)
    wanted = forward(model, batches[0])
    found = match_heads(model, batches, progress=False)
    assert found.orders == {}
    assert "correlation" not in str(found)
    assert orders(model) == in_config(model) == [None]
    assert torch.equal(forward(model, batches[0]), wanted)
    calibrate(model, batches, progress=False)
    assert orders(model) == [None]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT reads it
def test_every_copy_that_peft_keeps() -> None:
    model: Any = patch_model(fresh("llama"), "gated+modern_hopfield")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["attn_swap"]))
    found = match_heads(model, batch_of("llama"), progress=False)
    assert orders(model) == [order for index in range(3) for order in [found.orders.get(index)] * 2]


# ---- Refusals, and what is left behind


def test_refused() -> None:
    batch = batch_of("llama")
    with refused("not patched"):
        match_heads(fresh("llama"), batch)
    for variant, options in (("belief", {}), (MHA, {"alpha_prime": 0.0})):
        with refused("no swapped layer carries scores"):
            match_heads(patch_model(fresh("llama"), variant, **options), batch)
    model = put(patch_model(fresh("llama"), MHA))
    for batches in ([], {}, torch.ones(2, 3)):
        with pytest.raises(ValueError, match=r"there are no batches|a batch is a dict of tensors"):
            match_heads(model, batches, progress=False)
    model.model.layers[1].self_attn.q_proj.weight.data.fill_(math.inf)
    with refused("layer 1: scores are not finite"):
        match_heads(model, batch, progress=False)
    assert orders(model) == [tuple(each) for each in in_config(model)] == list(ORDERS)


@pytest.mark.parametrize(("change", "reason"), [("merged", "cannot be matched"), ("retrained", "before the training")])
def test_weights_that_fit_their_orders_are_refused(change: str, reason: str) -> None:
    model = put(patch_model(fresh("llama"), MHA))
    if change == "merged":
        swaps(model)[2].put(MergedCalibration("map"))
    else:
        swaps(model)[2].retrained = True
    with refused("layers [2]", reason):
        match_heads(model, batch_of("llama"), progress=False)
    assert orders(model) == list(ORDERS)


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = put(patch_model(fresh("llama"), MHA))
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(ImportError, match=r"SciPy is not installed; pip install .hf-attn-swap\[train\]"):
        match_heads(model, batch_of("llama"), progress=False)
    assert orders(model) == list(ORDERS)


def test_nothing_is_left_behind() -> None:
    """Modes, hooks, strengths and swaps are as before, also after an error on the way."""
    model = patch_model(fresh("llama"), MHA, strength=0.3).train()
    model.model.layers[1].eval()
    paths = [path for path, _ in model.named_modules()]
    before = [modes_and_hooks(model.get_submodule(path)) for path in paths]
    own = swaps(model)
    match_heads(model, batch_of("llama"), progress=False)
    with pytest.raises(IndexError):
        match_heads(model, {"input_ids": torch.full((1, 3), 10**6)}, progress=False)
    assert [modes_and_hooks(model.get_submodule(path)) for path in paths] == before
    assert [one is other for one, other in zip(swaps(model), own, strict=True)] == [True] * 3
    assert {(swap.strength, swap.phase.value) for swap in swaps(model)} == {(0.3, "between")}


# ---- Calibration


@pytest.mark.parametrize("name", ["llama", *named([(name,) for name in NUMBERED if name != "llama"], pytest.mark.slow)])
def test_calibration_matches_first(name: str) -> None:
    """As by hand; an iterator of batches is read once, and the fit sees all of it."""
    batches = several(name)
    by_hand = patch_model(fresh(name), MHA)
    found = match_heads(by_hand, batches, progress=False)
    wanted = calibrate(by_hand, batches, match=False, progress=False)
    assert orders(by_hand) == [found.orders.get(index) for index in range(len(swaps(by_hand)))]
    model = patch_model(fresh(name), MHA)
    read: list[int] = []
    report = calibrate(model, (read.append(1) or each for each in batches), progress=False)
    assert len(read) == len(batches)
    assert report == wanted
    assert orders(model) == orders(by_hand)
    assert torch.equal(forward(model, batches[0]), forward(by_hand, batches[0]))


def test_the_fit_is_that_of_the_orders() -> None:
    """Least squares in the order that the model runs in: the heads by number have another fit."""
    batches = several("llama")[:3]
    fitted = []
    for match in (False, True):
        model = patch_model(fresh("llama"), MHA)
        report = calibrate(model, batches, fit="gain", ridge=0.0, match=match, progress=False)
        fitted.append([gain for layer in report.layers for gain in layer.gains])
    assert fitted[1] == pytest.approx(gains(batches, orders(model)), rel=1e-6)
    assert fitted[0] != pytest.approx(fitted[1], rel=1e-4)


def gains(batches: list[dict[str, Any]], chosen: list[Any]) -> list[float]:
    """<A, R> / <A, A> per layer and head: R are the stock heads over 1 - alpha, and A follow from H by the formula."""
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    products: list[Any] = [0.0] * 3
    squares: list[Any] = [0.0] * 3
    for batch in batches:
        scores, values = projected(fresh("llama"), batch)
        hidden = torch.zeros_like(scores[0])
        for index, (own, value) in enumerate(zip(scores, values, strict=True)):
            order = list(chosen[index] or range(4))
            hidden = (hidden + own[:, order]) / 2
            back = [order.index(head) for head in range(4)]
            ours, theirs = (each.masked_fill(future, -math.inf).softmax(-1) @ value for each in (hidden[:, back], own))
            products[index] = products[index] + 2 * (ours * theirs).sum((0, 2, 3))
            squares[index] = squares[index] + ours.square().sum((0, 2, 3))
    return torch.cat([product / square for product, square in zip(products, squares, strict=True)]).tolist()


def projected(stock: Any, batch: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """The scores (B,H,Q,K) and the values (B,H,K,D) of every layer of the stock model, by the slow reference."""
    slow = reference.reference_model(stock, "softmax")
    scores, values = [], []
    for layer in (module for module in slow.modules() if isinstance(module, reference.SlowLayer)):

        def kept(x: Tensor, rotary: Any, project: Any = layer.project) -> Any:
            q, k, v, scaling = project(x, rotary)
            scores.append(q @ k.transpose(2, 3) * scaling)
            values.append(v)
            return q, k, v, scaling

        layer.project = kept
    forward(slow, batch)
    return scores, values


def test_calibration_leaves_heads_alone() -> None:
    """If it is told to, and if the weights were trained with something else than softmax."""
    batches = several("llama")[:2]
    for options in ({"match": False}, {"source": "simpletron_res"}):
        for chosen in ([None] * 3, list(ORDERS)):
            model = put(patch_model(fresh("llama"), MHA), chosen)
            calibrate(model, iter(batches), fit="gain", progress=False, **options)
            assert orders(model) == chosen
    model = patch_model(fresh("llama"), MHA, alpha_prime=0.0)
    calibrate(model, batches, fit="gain", progress=False)
    assert orders(model) == [None] * 3


def test_a_calibration_that_fails_leaves_the_orders() -> None:
    for before in ([None] * 3, list(ORDERS)):
        model = put(patch_model(fresh("llama"), MHA), before)
        for batches in ([], [{"input_ids": torch.ones(1, 2, dtype=torch.long)}]):
            with pytest.raises(ValueError, match=r"there are no batches|2 real tokens are too few"):
                calibrate(model, batches, progress=False)
            assert orders(model) == before
            assert in_config(model) == [None if each is None else list(each) for each in before]


@pytest.mark.parametrize("name", NUMBERED)
def test_half_precision(name: str) -> None:
    """The scores are compared in float32, and the heads that meet are as alike as those of the float32 model."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = patch_model(fresh(name, dtype), MHA)
        found[dtype] = match_heads(model, batch_of(name, dtype), progress=False)
        assert torch.isfinite(forward(model, batch_of(name, dtype)).float()).all()
    assert found[torch.bfloat16].after == pytest.approx(found[torch.float32].after, abs=0.02)
