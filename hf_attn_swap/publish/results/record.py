"""Dataclasses whose fields are checked against their annotations.

A `Record` checks every field when the record is built. A numpy scalar becomes a Python number, a whole number becomes a
float if the annotation is float, and a list becomes a tuple. Every other value of the wrong type is an error.
"""

from __future__ import annotations

import math
import types
import typing
import unicodedata
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Any, TypeVar

import numpy as np
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but not in its __all__

Scalar = str | bool | int | float | None
R = TypeVar("R", bound="Record")
BREAKS = ("Cc", "Cs", "Zl", "Zp")  # Unicode categories: control characters, surrogates, line and paragraph separators
WORDS = {str: "a line of text", bool: "true or false", int: "a whole number", float: "a number"}


@dataclass(frozen=True, kw_only=True)
class Record:
    """The base class of all records. It checks the fields of a subclass on construction.

    Raises:
        ValueError: a field has a wrong value; the message names the field, the value, and what the value must be.
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in fields(self):
            object.__setattr__(self, field.name, fit(getattr(self, field.name), hints[field.name], field.name))

    def check(self, holds: bool, field: str, wanted: str) -> None:
        """Refuse a field whose value has the right type but breaks a rule.

        Args:
            holds: True if the value obeys the rule.
            field: name of the field.
            wanted: the rule in words.

        Raises:
            ValueError: `holds` is False.
        """
        if not holds:
            raise ValueError(f"{field} must be {wanted}, got {getattr(self, field)!r}.")

    def check_names(self, field: str, names: Iterable[str | None]) -> None:
        """Refuse names of the metadata of a card that look like HTML: YAML keeps them as they are.

        Raises:
            ValueError: a name has < or >.
        """
        for name in names:
            if name is not None and not {"<", ">"}.isdisjoint(name):
                raise ValueError(f"{field} must have names without < and >, got {name!r}.")

    def check_repo_id(self, field: str) -> None:
        """Refuse a field whose value cannot be a name on the Hub.

        Raises:
            ValueError: the value cannot be a name; the message quotes the reason that huggingface_hub gives.
        """
        try:
            validate_repo_id(getattr(self, field))
        except ValueError as problem:
            raise ValueError(f"{field} must be a name on the Hub: {problem}") from None


def read_record(cls: type[R], data: Any, where: str) -> R:
    """Build a record from plain data, as JSON gives it. `where` is the path of the data in the file.

    A field that has a default may be left out.

    Raises:
        ValueError: names every field that is missing or unknown, or the first field of a wrong type.
    """
    path = f"{where}." if where else ""
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object, got {data!r}.")
    hints = typing.get_type_hints(cls)
    names = [field.name for field in fields(cls)]
    wanted = [field.name for field in fields(cls) if field.default is MISSING]
    missing = [path + name for name in wanted if name not in data]
    unknown = [path + str(name) for name in data if name not in names]
    if missing or unknown:
        parts = []
        if missing:
            parts.append(f"missing fields: {', '.join(missing)}")
        if unknown:
            parts.append(f"unknown fields: {', '.join(unknown)}")
        raise ValueError("; ".join(parts) + ".")
    values = {name: fit(data[name], hints[name], path + name) for name in names if name in data}
    try:
        return cls(**values)
    except ValueError as problem:
        raise ValueError(f"{path}{problem}") from None


def fit(value: Any, hint: Any, where: str) -> Any:
    """The value, converted to the type of its annotation.

    Raises:
        ValueError: the value has another type, or is a number that is not finite.
    """
    if isinstance(value, np.generic):
        value = value.item()
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _fit_union(value, inner, where)
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} must be a list, got {value!r}.")
        return origin(fit(item, inner[0], f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object, got {value!r}.")
        return {fit(key, str, f"{where}, a name"): fit(item, inner[1], f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(hint):
        assert isinstance(hint, type)
        assert issubclass(hint, Record)
        return value if isinstance(value, hint) else read_record(hint, value, where)
    return _fit_scalar(value, hint, where)


def _fit_union(value: Any, hints: tuple[Any, ...], where: str) -> Any:
    if value is None and type(None) in hints:
        return None
    others = [hint for hint in hints if hint is not type(None)]
    if len(others) == 1:
        return fit(value, others[0], where)
    if type(value) in others:
        return fit(value, type(value), where)
    lists = [hint for hint in others if typing.get_origin(hint) is list]
    if lists and type(value) is list:
        return fit(value, lists[0], where)
    raise ValueError(
        f"{where} must be {', '.join(WORDS.get(hint, 'a list') for hint in others)} or null, got {value!r}."
    )


def _fit_scalar(value: Any, hint: type[Any], where: str) -> Any:
    if hint is float and type(value) is int:
        value = float(value)
    if type(value) is not hint:
        raise ValueError(f"{where} must be {WORDS[hint]}, got {value!r}.")
    if hint is float and not math.isfinite(value):
        raise ValueError(
            f"{where} is {value}; a run that diverged has no such figure: leave the seed out and say so in limits."
        )
    if hint is str and (not value.strip() or any(unicodedata.category(letter) in BREAKS for letter in value)):
        raise ValueError(f"{where} must be a line of text, not empty and without line breaks, got {value!r}.")
    return value
