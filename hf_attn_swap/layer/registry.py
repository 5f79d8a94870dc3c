"""Turns the name and the options that a user gives into variants: lookup, compositions and checks."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from typing import Any

from .. import variants  # noqa: F401  # registers every variant
from ..core.kind import Kind
from ..core.options import check_values, plain
from ..variants.base import VARIANTS, Variant

Options = dict[str, dict[str, Any]]
LONGEST = 100  # the largest number of characters that an error quotes
ALMOST = 0.8  # the similarity of two names of which one has a letter or two wrong


def list_variants() -> tuple[str, ...]:
    """The canonical names of all single variants, in the order of registration.

    A name such as "a+b" composes two variants that change different places of a layer.
    """
    return tuple(VARIANTS)


def canonical_name(variant: str) -> str:
    """The same variant or composition in canonical names. A name that no variant has stays as it is."""
    canonical = {alias: cls.name for cls in VARIANTS.values() for alias in cls.aliases}
    names = (name.strip() for name in variant.split("+"))
    return "+".join(canonical.get(name, name) for name in names)


def get_variant(name: str) -> type[Variant]:
    """The class registered under `name`, which is a canonical name or an alias.

    Raises:
        ValueError: no variant has this name.
    """
    cls = VARIANTS.get(canonical_name(name))
    if cls is None:
        raise ValueError(
            f"unknown variant {name!r}{_proposal(name)}; known: {', '.join(VARIANTS)}, and compositions such as "
            "'modern_hopfield+belief'. A variant of your own is known after its file was imported."
        )
    return cls


def _proposal(name: str) -> str:
    """A question that names the variants that are meant, most likely; empty if there are none.

    Those with a name that is almost the same; otherwise those with a word of this name in their names, their summary
    or their papers; otherwise the one with the most similar name.
    """
    names = {alias: cls.name for cls in VARIANTS.values() for alias in (cls.name, *cls.aliases)}
    words = {word for word in re.findall(r"[a-z]{4,}", name.lower()) if word != "attention"}
    said = {
        cls.name: " ".join((cls.name, *cls.aliases, cls.about.summary, cls.about.paper)).lower()
        for cls in VARIANTS.values()
    }
    sharing = {variant for variant, text in said.items() if words & {*re.findall(r"[a-z]+", text)}}
    meant = (
        _similar(name, names, ALMOST)
        or [variant for variant in VARIANTS if variant in sharing]
        or _similar(name, names, 0.6)
    )
    return f" (did you mean {' or '.join(map(repr, meant))}?)" if meant else ""


def _similar(name: str, names: Mapping[str, str], least: float) -> list[str]:
    """The canonical name of the most similar of all names, if it is similar enough (1 is equal)."""
    return [names[match] for match in difflib.get_close_matches(name, names, n=1, cutoff=least)]


def parse(variant: Any) -> tuple[type[Variant], ...]:
    """The classes that a variant's name stands for: one class, or several for a composition.

    Args:
        variant: a canonical name or an alias, or several joined by "+", as in "modern_hopfield+belief".

    Raises:
        ValueError: `variant` is no string, a name is unknown, a variant in a composition composes with nothing, or the
            same place is taken twice: by two variants, or by one variant under two names.
    """
    if not isinstance(variant, str):
        given = f"{variant!r}"
        if len(given) > LONGEST:  # a model, for one: the arguments may be in the wrong order
            given = f"a {type(variant).__name__}; patch_model and convert take the model first, then the variant"
        raise ValueError(f"the variant must be a name such as 'belief', got {given}.")
    classes = tuple(get_variant(name.strip()) for name in variant.split("+"))
    taken: dict[str, str] = {}
    for cls in classes:
        if cls.alone and len(classes) > 1:
            raise ValueError(f"{variant!r}: {cls.name!r} composes with nothing; use it alone.")
        for place in cls.places:
            if place in taken:
                raise ValueError(
                    f"{variant!r}: {taken[place]!r} and {cls.name!r} both change the {place}; compose variants that "
                    "change different places."
                )
            taken[place] = cls.name
    return classes


def parse_options(classes: tuple[type[Variant], ...], options: Mapping[str, Any]) -> Options:
    """The options of each variant, by the variant's name, with all defaults filled in.

    Args:
        classes: the variants, from `parse`.
        options: option by name for a single variant; one dict of options per variant for a composition, under any
            name of the variant.

    Raises:
        ValueError: a variant or an option is unknown, a variant gets options under two of its names, or a value has
            the wrong type or lies outside its range.
    """
    if len(classes) == 1:
        nested: dict[str, Any] = {classes[0].name: dict(options)}
    else:
        names = [cls.name for cls in classes]
        for key, value in options.items():
            if canonical_name(key) not in names or not isinstance(value, Mapping):
                raise ValueError(
                    f"options of a composition are one dict per component ({', '.join(names)}), got {key}={value!r}."
                )
        given = canonical_keys(options)
        nested = {name: dict(given.get(name, {})) for name in names}
    return {cls.name: plain(build_options(cls, nested[cls.name])) for cls in classes}


def tiny_options(variant: str) -> dict[str, Any]:
    """Options with which a text of a few tokens shows the variant, as `patch_model` takes them."""
    classes = parse(variant)
    if len(classes) == 1:
        return dict(classes[0].tiny)
    return {cls.name: dict(cls.tiny) for cls in classes if cls.tiny}


def canonical_keys(by_variant: Mapping[str, Any]) -> dict[str, Any]:
    """The same values by canonical names.

    Raises:
        ValueError: two keys are names of the same variant.
    """
    canonical: dict[str, Any] = {}
    for key, value in by_variant.items():
        name = canonical_name(key)
        if name in canonical:
            raise ValueError(f"{name!r} is given twice, under two of its names; give it once.")
        canonical[name] = value
    return canonical


def fit_options(classes: tuple[type[Variant], ...], options: Options, kind: Kind) -> Options:
    """The options of each variant, by the variant's name, for an attention module of this kind.

    Args:
        classes: the variants, from `parse`.
        options: the options of each variant, from `parse_options`.
        kind: the kind of the module.

    Raises:
        ValueError: an option is unknown, or a value has the wrong type or lies outside its range.
    """
    fitted = {cls.name: cls.fit_options(build_options(cls, options[cls.name]), kind) for cls in classes}
    return {name: plain(value) for name, value in fitted.items()}


def build_options(cls: type[Variant], given: Mapping[str, Any]) -> Any:
    """The options of one variant as its dataclass, with checked types.

    Raises:
        ValueError: an option is unknown, or a value has the wrong type or lies outside its range.
    """
    known = [field.name for field in dataclasses.fields(cls.Options)]
    for key in given:
        if key not in known:
            allowed = f"it takes {', '.join(known)}" if known else "it takes no options"
            raise ValueError(f"{cls.name}: unknown option {key!r}; {allowed}.")
    check_values(cls.Options, given, cls.name)
    return cls.Options(**given)
