"""Checks data that was read from a file: exact keys, and whole numbers. The data may come from a stranger."""

from __future__ import annotations

from typing import Any, TypeGuard


def check_keys(thing: Any, wanted: set[str], where: str) -> None:
    """Check that a part of the data is a dict with exactly these keys.

    Raises:
        ValueError: it is no dict, or has other keys.
    """
    if not isinstance(thing, dict) or set(thing) != wanted:
        keys = sorted(map(str, thing)) if isinstance(thing, dict) else type(thing).__name__
        raise ValueError(f"{where} must have exactly {sorted(wanted)}, found {keys}.")


def is_whole(value: Any) -> TypeGuard[int]:
    """True for a whole number. A bool is no number here."""
    return isinstance(value, int) and not isinstance(value, bool)
