"""Unpatching is bit-exact, other models do not change, and a failed patch leaves the model unchanged."""

from __future__ import annotations

import copy

import pytest

from hf_attn_swap import describe, patch_model, unpatch_model
from tests.harness.places import in_turn

from .cells import FAMILY_NAMES, ONCE, Cell, over
from .harness import assert_identical, batch_of, forward, fresh, padding_side, perturb, run, swaps
from .stock_again import anatomy, assert_stock_again, attentions, tensors


@over(ONCE)
def test_unpatch_is_bit_exact(family: str, cell: Cell) -> None:
    model, batch = fresh(family), batch_of(family, padded=padding_side(family))
    config, text = model.config, model.config.to_json_string()
    wanted, parts, weights = run(model, batch), anatomy(model), tensors(model)
    perturb(patch_model(model, cell[0]))
    forward(model, batch)
    assert model.config is not config
    assert config.to_json_string() == text, "the stock config must not be written to"
    assert unpatch_model(model) is model
    assert_stock_again(model, parts, weights, config, text)
    assert_identical(run(model, batch), wanted)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_unpatch_after_hybrids_and_repeats(family: str) -> None:
    model, batch = fresh(family), batch_of(family)
    config, text = model.config, model.config.to_json_string()
    wanted, parts, weights = run(model, batch), anatomy(model), tensors(model)
    for variant in ("modern_hopfield", "belief_star", "simpletron", "outeffhop+gated"):
        patch_model(model, variant)
        patch_model(model, "belief", layers=[0])
    unpatch_model(model)
    assert_stock_again(model, parts, weights, config, text)
    assert_identical(run(model, batch), wanted)
    patch_model(model, "belief")  # and once more from the start
    assert len(swaps(model)) == len(describe(model).rows)


@in_turn()
def test_a_second_model_from_the_same_config_is_untouched(name: str, variant: str) -> None:
    first = fresh(name)
    second = type(first)(first.config).to(first.dtype).eval()
    assert second.config is first.config
    batch = batch_of(name)
    wanted, parts = run(second, batch), anatomy(second)
    patch_model(first, variant)
    third = type(second)(second.config)
    assert anatomy(second) == parts
    assert_identical(run(second, batch), wanted)
    assert not swaps(third)
    patch_model(second, "softmax")
    assert {row.attention for row in describe(first).rows} == {variant}
    unpatch_model(first)
    assert {row.attention for row in describe(second).rows} == {"softmax"}
    assert_identical(run(second, batch), wanted)


def test_a_config_that_the_user_puts_in_place_is_left_alone() -> None:
    model = fresh("bert")
    config = model.config
    patch_model(model, "belief")
    own = copy.deepcopy(config)
    own.label_of_the_user = "mine"
    model.config, text = own, own.to_json_string()
    unpatch_model(model)
    assert model.config is config
    assert own.to_json_string() == text


def test_hybrids_and_the_last_call_wins() -> None:
    model = patch_model(fresh("bert"), "modern_hopfield", layers=range(2))
    assert attentions(model) == ["modern_hopfield", "modern_hopfield", "softmax (stock)"]
    patch_model(model, "belief", layers=[1, 2], strength=0.5)
    assert attentions(model) == ["modern_hopfield", "belief", "belief"]
    patch_model(model, "gated", layers=1, kind="mlp")
    assert attentions(model) == ["modern_hopfield", "gated", "belief"]
    assert [row.strength for row in describe(model).rows] == [1.0, 1.0, 0.5]
    patch_model(model, "simpletron")
    assert attentions(model) == ["simpletron"] * 3
    assert not [name for name, _ in model.named_parameters() if "attn_swap" in name]


@in_turn()
def test_a_second_call_equals_only_that_call(name: str, variant: str) -> None:
    """Nothing of the first swap stays: classes, hooks, scores."""
    once, twice, batch = fresh(name), fresh(name), batch_of(name)
    patch_model(once, variant)
    patch_model(patch_model(twice, "modern_hopfield+belief", strength=0.5), variant)
    parts = [anatomy(model) for model in (once, twice)]
    for part in (part for parts_of in parts for part in parts_of.values()):
        part.pop("config")
    assert parts[0] == parts[1]
    assert_identical(run(twice, batch), run(once, batch))
    before, after = once.config.attn_swap, twice.config.attn_swap
    assert before == after


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_failed_patch_leaves_the_model_unchanged(family: str) -> None:
    model, batch = fresh(family), batch_of(family)
    config, text = model.config, model.config.to_json_string()
    wanted, parts, weights = run(model, batch), anatomy(model), tensors(model)
    wrong = [
        ("belief", {"layers": [99]}),
        ("modern_hopfield", {"alpha": 2}),
        ("belief+gated", {}),
        ("gated", {"strength": 2}),
    ]
    for variant, arguments in wrong:
        with pytest.raises(ValueError):  # noqa: PT011  # reasons: test_refusals_arguments
            patch_model(model, variant, **arguments)
        assert_stock_again(model, parts, weights, config, text)
    assert_identical(run(model, batch), wanted)
    patch_model(model, "modern_hopfield", strength=0.5)
    wanted, parts, block = run(model, batch), anatomy(model), copy.deepcopy(model.config.attn_swap)
    for variant, arguments in wrong:
        with pytest.raises(ValueError):  # noqa: PT011  # as above
            patch_model(model, variant, **arguments)
        assert anatomy(model) == parts
        assert model.config.attn_swap == block
    assert_identical(run(model, batch), wanted)


def test_a_patch_that_fails_while_it_wires_leaves_the_model_unchanged() -> None:
    """The second layer's container cannot take another class: the first must not keep its own."""
    model = fresh("bert")
    attention = model.base_model.encoder.layer[1].attention
    attention.forward = attention.forward
    parts, config = anatomy(model), model.config
    with pytest.raises(ValueError, match="already wrapped"):
        patch_model(model, "modern_hopfield")
    assert anatomy(model) == parts
    assert model.config is config
