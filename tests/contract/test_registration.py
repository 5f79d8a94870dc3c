"""Registration refuses a variant whose methods and declared places disagree, since an undeclared method never runs."""

from __future__ import annotations

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


def test_a_class_without_words_for_the_documentation() -> None:
    with refused(NAME, "set about = About("):
        register(NAME)(variant(("read",), "read", about="halves the heads"))


def test_a_place_without_its_method_and_a_method_without_its_place() -> None:
    for place in PLACES:
        with refused(NAME, repr(place), f"no method {METHODS[place]}"):
            register(NAME)(variant((place,)))
        for other in set(PLACES) - {place}:
            with refused(NAME, f"the method {METHODS[other]} would never run", repr(other)):
                register(NAME)(variant((place,), METHODS[place], METHODS[other]))


def test_methods_that_would_never_run() -> None:
    for name in ("linear", "products", "read_between"):
        with refused(NAME, name, "would never run in a Variant"):
            register(NAME)(variant(("read",), "read", name))
    for name in ("carry", "normalize", "adjust", "heads"):
        with refused(NAME, name, "would never run in a Replacement"):
            register(NAME)(replacement(*REPLACING, name))
    with refused(NAME, "heads would never run"):
        register(NAME)(variant(("read",), "read", "heads"))


@pytest.mark.parametrize("missing", REPLACING)
def test_a_replacement_without_one_of_its_methods(missing: str) -> None:
    methods = [name for name in REPLACING if name != missing]
    with refused(NAME, missing):
        register(NAME)(replacement(*methods))
    register(NAME)(replacement(*REPLACING))


@pytest.mark.parametrize("attributes", [{"alone": False}, {"places": ("read", "write")}])
def test_a_replacement_takes_every_place_and_composes_with_nothing(attributes: dict[str, Any]) -> None:
    with refused(NAME, "takes all places and composes with nothing"):
        register(NAME)(replacement(*REPLACING, **attributes))


def test_replaces_is_for_replacements() -> None:
    with refused(NAME, "let the class inherit from it"):
        register(NAME)(variant(PLACES, *REPLACING, replaces=True, alone=True))


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


def test_a_residual_stream_without_write() -> None:
    with refused(NAME, "wants_residual"):
        register(NAME)(variant(("read",), "read", wants_residual=True))


def test_unknown_places_and_taken_or_impossible_names() -> None:
    with refused(NAME, "['scorse']", "the places are keys"):
        register(NAME)(variant(("scorse",)))
    with refused("'no name'", "letters"):
        register("no name")(variant(("read",), "read"))


def test_a_taken_name_is_refused_as_name_and_as_alias() -> None:
    before = dict(VARIANTS)
    for taken in [name for cls in before.values() for name in (cls.name, *cls.aliases)]:
        with refused(f"{taken!r} is registered already"):
            register(taken)(variant(("read",), "read"))
        with refused(f"{taken!r} is registered already"):
            register(NAME, aliases=("another", taken))(variant(("read",), "read"))
    assert before == VARIANTS


@pytest.mark.parametrize(("aliases", "why"), [((NAME,), "already"), (("a", "a"), "already"), (("a b",), "letters")])
def test_impossible_aliases(aliases: tuple[str, ...], why: str) -> None:
    with refused(repr(aliases[-1]), why):
        register(NAME, aliases=aliases)(variant(("read",), "read"))
    assert NAME not in VARIANTS


@pytest.mark.parametrize("place", ["scores", "normalizer", "weights", "read", "write"])
def test_a_method_that_returns_another_shape(place: str) -> None:
    """One row less would be broadcast, without an error."""

    def smaller(self: Any, tensor: Any, *_: Any) -> Any:
        return tensor[:, :1]

    register(NAME)(variant((place,), **{METHODS[place]: smaller}))
    model = patch_model(fresh("gpt2"), NAME)
    with refused(NAME, METHODS[place], "shape", "expected"):
        forward(model, batch_of("gpt2"))
