"""Registration refuses a variant whose methods and declared places disagree, since an undeclared method never runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from hf_attn_swap.core.call import Geometry
from hf_attn_swap.kernels.dispatch import Form, Setting
from hf_attn_swap.variants.about import About
from hf_attn_swap.variants.base import METHODS, PLACES, REPLACING, VARIANTS, Replacement, Variant, register

from .harness import batch_of, forward, fresh, refused

pytestmark = pytest.mark.usefixtures("registry_as_before")
NAME = "tried_out"


def method(self: Any, *tensors: Any) -> Any:
    return tensors[0]


ABOUT = About(summary="an example", formula="an example", paper="an example", fused="an example")


def variant(places: tuple[str, ...], *methods: str, **attributes: Any) -> type[Variant]:
    body = {"about": ABOUT, "places": places, **dict.fromkeys(methods, method), **attributes}
    return type("TriedOut", (Variant,), body)


def replacement(*methods: str, **attributes: Any) -> type[Replacement]:
    return type("TriedOut", (Replacement,), {"about": ABOUT, **dict.fromkeys(methods, method), **attributes})


@pytest.mark.parametrize("place", PLACES)
def test_a_sound_class_is_taken(place: str) -> None:
    cls = register(NAME)(variant((place,), METHODS[place]))
    assert VARIANTS[NAME] is cls


def refusals() -> Iterator[tuple[type[Variant], tuple[str, ...]]]:
    """Classes that contradict themselves, and words of their refusals."""
    yield variant(("read",), "read", about="halves the heads"), ("set about = About(",)
    for place in PLACES:
        yield variant((place,)), (repr(place), f"no method {METHODS[place]}")
        for other in set(PLACES) - {place}:
            yield variant((place,), METHODS[place], METHODS[other]), (f"the method {METHODS[other]}", repr(other))
    for name in ("linear", "products", "read_between"):
        yield variant(("read",), "read", name), (name, "would never run in a Variant")
    yield variant(("read",), "read", "heads"), ("heads would never run",)
    for name in ("carry", "normalize", "adjust", "heads"):
        yield replacement(*REPLACING, name), (name, "would never run in a Replacement")
    for missing in REPLACING:
        yield replacement(*(name for name in REPLACING if name != missing)), (missing,)
    for more in ({"alone": False}, {"places": ("read", "write")}):
        yield replacement(*REPLACING, **more), ("takes all places and composes with nothing",)
    yield variant(PLACES, *REPLACING, replaces=True, alone=True), ("let the class inherit from it",)
    yield variant(("read",), "read", wants_residual=True), ("wants_residual",)
    yield variant(("scorse",)), ("['scorse']", "the places are keys")


def test_a_class_that_contradicts_itself_is_refused() -> None:
    for cls, reasons in refusals():
        with refused(NAME, *reasons):
            register(NAME)(cls)
    register(NAME)(replacement(*REPLACING))


CLIP = {"rule": lambda self, rule: replace(rule, gamma=-0.1)}


@pytest.mark.parametrize(
    ("places", "methods", "more", "form"),
    [
        (("read",), ("read",), {}, Form.SDPA),
        (("write",), ("write",), {}, Form.SDPA),
        (("normalizer",), ("normalize",), {}, Form.REFERENCE),
        (("weights",), ("adjust",), {}, Form.REFERENCE),
        (("scores",), ("carry",), {}, Form.REFERENCE),
        (("normalizer",), ("normalize", "heads"), {}, Form.SDPA),
        (("weights",), ("adjust",), CLIP, Form.WEIGHTED),
    ],
)
def test_the_form_of_a_class_that_names_none(
    places: tuple[str, ...], methods: tuple[str, ...], more: dict[str, Any], form: Form
) -> None:
    cls = register(NAME)(variant(places, *methods, **more))
    made = cls(cls.Options(), Geometry(heads=2, kv_heads=2, head_dim=4, hidden=8))
    assert made.form(Setting(device="cpu", dtypes=(torch.float32,), between=False)) is form


def test_a_taken_name_is_refused_as_name_and_as_alias() -> None:
    before = dict(VARIANTS)
    for taken in [name for cls in before.values() for name in (cls.name, *cls.aliases)]:
        with refused(f"{taken!r} is registered already"):
            register(taken)(variant(("read",), "read"))
        with refused(f"{taken!r} is registered already"):
            register(NAME, aliases=("another", taken))(variant(("read",), "read"))
    assert before == VARIANTS
    with refused("'no name'", "letters"):
        register("no name")(variant(("read",), "read"))


@pytest.mark.parametrize(("aliases", "why"), [((NAME,), "already"), (("a", "a"), "already"), (("a b",), "letters")])
def test_impossible_aliases(aliases: tuple[str, ...], why: str) -> None:
    with refused(repr(aliases[-1]), why):
        register(NAME, aliases=aliases)(variant(("read",), "read"))
    assert NAME not in VARIANTS


@pytest.mark.parametrize(
    ("place", "name"),
    [("scores", "score_mod"), *((place, METHODS[place]) for place in ("scores", *PLACES[3:]))],
)
def test_a_method_that_returns_another_shape(place: str, name: str) -> None:
    """One row less would be broadcast, without an error."""

    def smaller(self: Any, tensor: Any, *_: Any) -> Any:
        return tensor[:, :1]

    register(NAME)(variant((place,), **{name: smaller}))
    model = patch_model(fresh("gpt2"), NAME)
    with refused(NAME, name, "shape", "expected"):
        forward(model, batch_of("gpt2"))
