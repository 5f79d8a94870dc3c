"""Checks the options of a variant: the annotation of a field says which values the field may hold.

An option that takes one of several names has a `typing.Literal` type, and `choices` lists the names. An option of
several numbers has a type such as `tuple[int, ...]`, and takes a list or a range too. A field can also say why other
names are refused: `field(default=..., metadata={REASON: "..."})`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

LARGEST = 1e12  # an option that is a number must be smaller; not-a-number and infinity fail this comparison too
REASON = "reason"  # a key in a field's metadata: a sentence that says why other values are refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The base class of a variant's options. A subclass adds one field per option; this class has no option.

    Raises:
        ValueError: a value does not fit the annotation of its field.
    """

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        check_values(type(self), given, type(self).__name__)


def plain(options: Any) -> dict[str, Any]:
    """The options as JSON keeps them: tuples become lists.

    Args:
        options: an instance of a subclass of `Options`.
    """
    values = dataclasses.asdict(options)
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def choices(hint: Any) -> tuple[Any, ...]:
    """The values that a `Literal` lists. The result is empty for any other annotation."""
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def check_values(options: type[Any], given: Mapping[str, Any], owner: str) -> None:
    """Check values against the annotations of an options dataclass.

    Args:
        options: the dataclass.
        given: the values, by the name of the field.
        owner: the name of the variant that the options belong to. The error starts with this name.

    Raises:
        ValueError: a value does not fit the annotation of its field. The error says which values fit.
    """
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        if field.name not in given or _fits(given[field.name], hints[field.name]):
            continue
        wanted = _wanted(hints[field.name])
        message = f"{owner}: option {field.name} must be {wanted}, got {given[field.name]!r}."
        reason = field.metadata.get(REASON)
        raise ValueError(f"{message} {reason}" if reason else message)


def _fits(value: Any, hint: Any) -> bool:
    """True if a value fits an annotation. An int fits float; a bool fits neither int nor float."""
    if typing.get_origin(hint) is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in choices(hint))
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:  # a file keeps it as a list
        return isinstance(value, (list, tuple, range)) and all(_fits(item, typing.get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _wanted(hint: Any) -> str:
    """The values that an annotation accepts, in words."""
    if typing.get_origin(hint) is tuple:
        return f"a list of {_wanted(typing.get_args(hint)[0])}"
    names = [repr(choice) for choice in choices(hint)]
    if not names:
        return getattr(hint, "__name__", str(hint))
    if len(names) == 1:
        return names[0]
    return f"{', '.join(names[:-1])} or {names[-1]}"
