"""From a name to a variant: lookup, options, compositions, and the errors a user sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .. import variants  # noqa: F401  # registers every variant
from ..variants.base import VARIANTS, Variant
from .options import check_values

Options = dict[str, dict[str, Any]]


def list_variants() -> tuple[str, ...]:
    """Names of all single variants, in order of registration; "a+b" composes those that touch different places."""
    return tuple(VARIANTS)


def get_variant(name: str) -> type[Variant]:
    """The class registered under `name`.

    Raises:
        ValueError: nothing is registered under it.
    """
    if name not in VARIANTS:
        raise ValueError(
            f"unknown variant {name!r}; known: {', '.join(VARIANTS)}, and compositions such as 'mha+belief'."
        )
    return VARIANTS[name]


def parse(variant: str) -> tuple[type[Variant], ...]:
    """The classes of a variant name or a "+" composition, checked to touch different places.

    Raises:
        ValueError: not a name, an unknown name, a repeated one, or two that touch the same place.
    """
    if not isinstance(variant, str):
        raise ValueError(f"the variant must be a name such as 'belief', got {variant!r}.")
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
    """Options by component, complete with defaults; flat for a single variant, a dict per component otherwise.

    Raises:
        ValueError: unknown component or option, a value of the wrong type or outside its range.
    """
    if len(classes) == 1:
        nested: dict[str, Any] = {classes[0].name: dict(options)}
    else:
        names = [cls.name for cls in classes]
        for key, value in options.items():
            if key not in names or not isinstance(value, Mapping):
                raise ValueError(
                    f"options of a composition are one dict per component ({', '.join(names)}), got {key}={value!r}."
                )
        nested = {name: dict(options.get(name, {})) for name in names}
    return {cls.name: dataclasses.asdict(build_options(cls, nested[cls.name])) for cls in classes}


def build_options(cls: type[Variant], given: Mapping[str, Any]) -> Any:
    """The options dataclass of one variant, type-checked.

    Raises:
        ValueError: unknown option, wrong type or value.
    """
    known = [field.name for field in dataclasses.fields(cls.Options)]
    for key in given:
        if key not in known:
            allowed = f"it takes {', '.join(known)}" if known else "it takes no options"
            raise ValueError(f"{cls.name}: unknown option {key!r}; {allowed}.")
    check_values(cls.Options, given, cls.name)
    return cls.Options(**given)
