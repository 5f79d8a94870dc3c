"""Registration refuses a variant whose methods and declared places disagree, since an undeclared method never runs."""

from __future__ import annotations

from typing import Any

import pytest

from hf_attn_swap.variants.base import METHODS, PLACES, REPLACING, VARIANTS, Variant, register

from .harness import refused

pytestmark = pytest.mark.usefixtures("registry_as_before")
NAME = "tried_out"


def method(self: Any, *tensors: Any) -> Any:
    return tensors[0]


def variant(places: tuple[str, ...], *methods: str, **attributes: Any) -> type[Variant]:
    body = {"places": places, **dict.fromkeys(methods, method), **attributes}
    body |= dict.fromkeys(("summary", "formula", "paper", "fused"), "an example")
    return type("TriedOut", (Variant,), body)


def extras(place: str) -> dict[str, Any]:
    """What a sound class of this place has beside its method."""
    return {"carries": True} if place == "scores" else {}


@pytest.mark.parametrize("place", PLACES)
def test_a_sound_class_is_taken(place: str) -> None:
    cls = register(NAME)(variant((place,), METHODS[place], **extras(place)))
    assert VARIANTS[NAME] is cls


def test_carry_without_carries_would_compute_ordinary_softmax() -> None:
    with refused(NAME, "set carries = True"):
        register(NAME)(variant(("scores",), "carry"))


@pytest.mark.parametrize("place", [place for place in PLACES if place != "scores"])
def test_carries_without_the_place(place: str) -> None:
    with refused(NAME, "carries = True", "'scores'"):
        register(NAME)(variant((place,), METHODS[place], carries=True))


@pytest.mark.parametrize("place", PLACES)
def test_a_place_without_its_method(place: str) -> None:
    with refused(NAME, repr(place), f"no method {METHODS[place]}"):
        register(NAME)(variant((place,), **extras(place)))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("other", PLACES)
def test_a_method_without_its_place(place: str, other: str) -> None:
    if place == other:
        return
    with refused(NAME, f"the method {METHODS[other]} would never run", repr(other)):
        register(NAME)(variant((place,), METHODS[place], METHODS[other], **extras(place)))


@pytest.mark.parametrize("name", ["linear", "products", "read_between"])
def test_methods_of_a_replacement_without_replaces(name: str) -> None:
    with refused(NAME, name, "replaces = False"):
        register(NAME)(variant(("read",), "read", name))


@pytest.mark.parametrize("missing", REPLACING)
def test_a_replacement_without_one_of_its_methods(missing: str) -> None:
    methods = [name for name in REPLACING if name != missing]
    with refused(NAME, missing):
        register(NAME)(variant(PLACES, *methods, replaces=True, alone=True))
    register(NAME)(variant(PLACES, *REPLACING, replaces=True, alone=True))


@pytest.mark.parametrize("attributes", [{"alone": False}, {"places": ("read", "write")}])
def test_a_replacement_takes_every_place_and_composes_with_nothing(attributes: dict[str, Any]) -> None:
    chosen = {"places": PLACES, "alone": True, **attributes}
    with refused(NAME, "takes all places and composes with nothing"):
        register(NAME)(variant(chosen["places"], *REPLACING, replaces=True, alone=chosen["alone"]))


def test_a_fused_form_without_a_place_for_it() -> None:
    with refused(NAME, "heads would never run"):
        register(NAME)(variant(("read",), "read", "heads"))


def test_a_residual_stream_without_write() -> None:
    with refused(NAME, "wants_residual"):
        register(NAME)(variant(("read",), "read", wants_residual=True))


def test_unknown_places_and_taken_or_impossible_names() -> None:
    with refused(NAME, "['scorse']", "the places are keys"):
        register(NAME)(variant(("scorse",)))
    with refused("'belief' is registered already"):
        register("belief")(variant(("read",), "read"))
    with refused("'no name'", "letters"):
        register("no name")(variant(("read",), "read"))


@pytest.mark.parametrize("taken", [name for cls in VARIANTS.values() for name in (cls.name, *cls.aliases)])
def test_a_taken_name_is_refused_as_name_and_as_alias(taken: str) -> None:
    before = dict(VARIANTS)
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
