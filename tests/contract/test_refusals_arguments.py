"""Wrong names, options, layers and strengths: ValueError with what was wrong, what came, and what is allowed."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from typing import Any

import pytest
import torch

from hf_attn_swap import describe, functional, patch_model, set_strength, unpatch_model
from hf_attn_swap.core.call import Geometry
from hf_attn_swap.layer.registry import build_options, parse
from hf_attn_swap.variants.base import PLACES, VARIANTS, Variant

from .cells import PAIRS, SINGLES, choices, composes
from .harness import fresh, refused

NAMED_OPTIONS = [
    (name, option)
    for name in SINGLES
    for option in typing.get_type_hints(VARIANTS[name].Options)
    if choices(VARIANTS[name].Options, option)
]
FLOAT_OPTIONS = [
    (name, option)
    for name in SINGLES
    for option, hint in typing.get_type_hints(VARIANTS[name].Options).items()
    if hint is float or hint == (float | None)
]
IMPOSSIBLE = [names for names in itertools.combinations_with_replacement(SINGLES, 2) if not composes(names)]


def refuse(*reasons: str, variant: Any, **arguments: Any) -> None:
    """`patch_model` must raise ValueError with these words, and leave a stock model behind."""
    model = fresh("bert")
    config = model.config
    with refused(*reasons):
        patch_model(model, variant, **arguments)
    assert model.config is config
    assert not any("swap" in name for name, _ in model.named_modules())


@pytest.mark.parametrize(
    "variant", ["no_such", "", "modern_hopfield+no_such", "modern_hopfield+", None, 3, ("modern_hopfield", "belief")]
)
def test_unknown_variant(variant: Any) -> None:
    refuse(*SINGLES if isinstance(variant, str) else (repr(variant),), variant=variant)


def test_same_place_twice_and_alone() -> None:
    for names in IMPOSSIBLE:
        first, second = (VARIANTS[name] for name in names)
        if first.alone or second.alone:
            reasons = ["composes with nothing"]
        else:
            (place, *_) = (place for place in PLACES if place in first.places and place in second.places)
            reasons = ["both change the", place, repr(first.name), repr(second.name)]
        for pair in (names, names[::-1]):
            with refused(*reasons):
                parse("+".join(pair))
    refuse("both change the", variant="gated+belief")


@pytest.mark.parametrize("name", SINGLES)
def test_unknown_option(name: str) -> None:
    known = typing.get_type_hints(VARIANTS[name].Options)
    refuse(name, "'no_such'", *(known or ["no options"]), variant=name, no_such=1)


@pytest.mark.parametrize("value", ["sideways", "", 1, None, ["zero"]])
def test_wrong_choice(value: Any) -> None:
    for name, option in NAMED_OPTIONS:
        cls = VARIANTS[name].Options
        allowed = [repr(choice) for choice in choices(cls, option)]
        assert len(allowed) > 1
        refuse(f"{name}: option {option} must be", *allowed, f"got {value!r}", variant=name, **{option: value})
        with refused(f"{cls.__name__}: option {option} must be", *allowed, f"got {value!r}"):
            cls(**{option: value})


def test_no_option_takes_any_text() -> None:
    """A name that an option takes is in its type, where the command line, the tests and the documentation find it."""
    assert not [name for name in SINGLES if str in typing.get_type_hints(VARIANTS[name].Options).values()]


def test_choices_of_a_variant_from_outside_are_checked() -> None:
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Foreign:
        mode: typing.Literal["even", "odd"] = "even"

    outside = type("Outside", (Variant,), {"name": "outside", "Options": Foreign})
    assert build_options(outside, {"mode": "odd"}) == Foreign(mode="odd")
    with refused("outside: option mode must be 'even'"):
        build_options(outside, {"mode": "both"})


@pytest.mark.parametrize("value", ["0.5", True, math.nan, math.inf, [0.5]])
def test_numbers_must_be_numbers(value: Any) -> None:
    for name, option in FLOAT_OPTIONS:
        refuse(f"option {option} must be", "float", repr(value), variant=name, **{option: value})


@pytest.mark.parametrize("value", [["0"], [0.5], "0", 0])
def test_a_list_of_heads_must_be_one_of_numbers(value: Any) -> None:
    refuse("option full_heads must be", repr(value), variant="window", full_heads=value)


OUT_OF_RANGE = [
    ("modern_hopfield", {"alpha": -0.1}, "alpha must lie in [0, 1]"),
    ("modern_hopfield", {"alpha": 1.1}, "alpha must lie in [0, 1]"),
    ("modern_hopfield", {"alpha_prime": 1.1}, "alpha_prime must lie in [0, 1]"),
    ("modern_hopfield", {"scheme": "central"}, "The central scheme grows without bound"),
    ("modern_hopfield", {"scheme": "backward_forward"}, "not feed-forward"),
    ("modern_hopfield", {"scheme": "backward_backward"}, "not feed-forward"),
    ("gated", {"pi_init": 0.0}, "pi_init must lie between 0 and 1"),
    ("gated", {"pi_init": 1.0}, "pi_init must lie between 0 and 1"),
    ("clipped_softmax", {"gamma": 0.1}, "gamma <= 0"),
    ("clipped_softmax", {"zeta": 0.9}, "zeta >= 1"),
    ("clipped_softmax", {"alpha": 12.0}, "alpha and length go together"),
    ("clipped_softmax", {"length": 512}, "alpha and length go together"),
    ("clipped_softmax", {"alpha": -1.0, "length": 512}, "alpha must be >= 0"),
    ("clipped_softmax", {"alpha": 1.0, "length": 0}, "length >= 1"),
    ("clipped_softmax", {"alpha": 1.0, "length": 2.5}, "length must be"),
]


@pytest.mark.parametrize(("name", "options", "reason"), OUT_OF_RANGE)
def test_out_of_range(name: str, options: dict[str, Any], reason: str) -> None:
    refuse(name, reason, variant=name, **options)


def test_options_of_a_composition_are_one_dict_per_component() -> None:
    pair = PAIRS[0]
    names = pair.split("+")
    refuse("one dict per component", *names, "alpha=0.5", variant=pair, alpha=0.5)
    refuse("one dict per component", f"{names[0]}=3", variant=pair, **{names[0]: 3})
    refuse("one dict per component", "softmax={}", variant=pair, softmax={})
    refuse(f"{names[1]}: unknown option 'no_such'", variant=pair, **{names[1]: {"no_such": 1}})


@pytest.mark.parametrize("layers", [[3], [-1], [0, 99], range(2, 5), 3])
def test_layers_out_of_range(layers: Any) -> None:
    refuse("do not exist", "layers 0 to 2", variant="softmax", layers=layers)


@pytest.mark.parametrize("layers", [[], "0", b"0", [0.5], [True], True, 1.0, [[0]], ["0"], [None], [torch.tensor(0.5)]])
def test_layers_must_be_whole_numbers(layers: Any) -> None:
    refuse("layers must be whole numbers", variant="softmax", layers=layers)


@pytest.mark.parametrize("strength", [-0.1, 1.1, math.nan, math.inf, True, "1", None, [0.5]])
def test_strength(strength: Any) -> None:
    refuse("strength must be a number from 0", repr(strength), variant="softmax", strength=strength)
    model = patch_model(fresh("bert"), "belief", strength=0.5)
    with refused("strength must be a number from 0"):
        set_strength(model, strength)
    assert {row.strength for row in describe(model).rows} == {0.5}


def test_strength_of_layers_that_are_not_swapped() -> None:
    model = patch_model(fresh("bert"), "belief", layers=[1])
    with refused("layers [0] are not swapped; swapped"):
        set_strength(model, 0.5, layers=[0, 1])
    with refused("do not exist"):
        set_strength(model, 0.5, layers=7)
    assert [row.strength for row in describe(model).rows] == [None, 1.0, None]


def test_model_that_is_not_patched() -> None:
    for act in (unpatch_model, lambda model: set_strength(model, 0.5)):
        with refused("not patched; call patch_model"):
            act(fresh("bert"))


WIDTH = Geometry(heads=4, kv_heads=4, head_dim=8, hidden=30)


def test_sizes_that_do_not_fit() -> None:
    """H * D = 32 is not E = 30, and 4 heads do not divide it: simpletron without W_o and the slices of gated refuse."""
    wrong = {("simpletron", None), ("simpletron_res", None), ("gated", "linear"), ("gated", "mlp")}
    for name in SINGLES:
        cls = VARIANTS[name]
        for value in choices(cls.Options, "kind") if "kind" in typing.get_type_hints(cls.Options) else (None,):
            options = cls.Options() if value is None else cls.Options(kind=value)
            if (name, value) not in wrong:
                cls(options, WIDTH)
                continue
            with refused("width", "30"):
                cls(options, WIDTH)


def test_slices_too_narrow_for_the_mlp_gate() -> None:
    narrow = Geometry(heads=8, kv_heads=8, head_dim=2, hidden=16)
    cls = VARIANTS["gated"]
    with refused("at least 4 features per head"):
        cls(cls.Options(kind="mlp"), narrow)


BARE = torch.zeros(1, 1, 3, 4)
FORMULAS = [
    (lambda: functional.softmax_n(BARE, -1.0), "n >= 0, got -1.0"),
    (lambda: functional.clipped_softmax(BARE, 0.1, 1.0), "gamma <= 0"),
    (lambda: functional.clipped_softmax(BARE, 0.0, 0.5), "zeta >= 1"),
    (lambda: functional.simple_attention(BARE, BARE, BARE, length="long"), "'true' or 'fixed', got 'long'"),
    (lambda: functional.simple_attention(BARE, BARE[:, :, :2], BARE[:, :, :2], causal=True), "2 < 3"),
    (lambda: functional.hopfield_retrieve(BARE[0, 0, 0], BARE[0, 0], 1.0, normalizer="max"), "sparsemax"),
    (lambda: functional.hopfield_retrieve(BARE[0, 0, 0], BARE[0, 0], 1.0, steps=0), "at least 1, got 0"),
]


@pytest.mark.parametrize(("call", "reason"), FORMULAS, ids=[reason for _, reason in FORMULAS])
def test_formulas(call: Any, reason: str) -> None:
    with refused(reason):
        call()


def test_arguments_in_the_wrong_order() -> None:
    """The sentence says the order, and prints no model."""
    with pytest.raises(ValueError, match="take the model first") as refusal:
        patch_model("belief", fresh("bert"))  # type: ignore[type-var, arg-type]
    assert len(str(refusal.value)) < 200
