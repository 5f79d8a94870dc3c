"""Options of a variant as data: the annotation of a field says which values the field may hold.

An option that takes one of several names has a `typing.Literal` type; `choices` lists the names. Where a refused name
deserves a reason, the field carries the reason: `field(default=..., metadata={REASON: "..."})`.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

LARGEST = 1e12  # of a number as an option: not-a-number and infinity fail the comparison too
REASON = "reason"  # metadata of a field: a sentence on the values that are refused


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Base of the options of a variant; a subclass adds fields. Without fields, the variant takes no options.

    Raises:
        ValueError: a value does not fit the annotation of its field.
    """

    def __post_init__(self) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        check_values(type(self), given, type(self).__name__)


def choices(hint: Any) -> tuple[Any, ...]:
    """The values that a `Literal` lists; nothing for any other annotation."""
    return typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()


def check_values(options: type[Any], given: Mapping[str, Any], owner: str) -> None:
    """Hold values against the annotations of an options dataclass.

    Args:
        options: the dataclass.
        given: values by field.
        owner: whose options they are; the error starts with this name.

    Raises:
        ValueError: a value does not fit its annotation; the error says which values do.
    """
    hints = typing.get_type_hints(options)
    for field in dataclasses.fields(options):
        if field.name in given and not _fits(given[field.name], hints[field.name]):
            wanted, reason = _wanted(hints[field.name]), field.metadata.get(REASON)
            message = f"{owner}: option {field.name} must be {wanted}, got {given[field.name]!r}."
            raise ValueError(f"{message} {reason}" if reason else message)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of its option; an int is a float, a bool is neither."""
    if typing.get_origin(hint) is typing.Literal:
        return any(type(value) is type(choice) and value == choice for choice in choices(hint))
    if isinstance(hint, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(hint))
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def _wanted(hint: Any) -> str:
    """What an annotation accepts, in words."""
    if found := choices(hint):
        return " or ".join(filter(None, (", ".join(map(repr, found[:-1])), repr(found[-1]))))
    return getattr(hint, "__name__", str(hint))
