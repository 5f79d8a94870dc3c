"""Turns what a user types, "0-5,7" and key=value, into arguments of `patch_model`."""

from __future__ import annotations

import json
from typing import Any


def parse_layers(text: str | None) -> list[int] | None:
    """Turn "0-5,7" into [0, 1, 2, 3, 4, 5, 7].

    Raises:
        ValueError: for anything else.
    """
    if text is None:
        return None
    layers: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f'--layers takes numbers and ranges such as "0-5,7", got {text!r}.')
        layers.update(range(int(first), int(last if dash else first) + 1))
    return sorted(layers)


def parse_options(pairs: list[str], *, composed: bool) -> dict[str, Any]:
    """Turn key=value pairs into keyword arguments of `patch_model`, one dict per component if composed.

    Raises:
        ValueError: for a pair of another form.
    """
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        component, dot, name = key.partition(".")
        if not equals or not component or bool(dot) != composed or (dot and not name):
            wanted = "component.key=value in a composition, as in gated.kind=mlp" if composed else "key=value"
            raise ValueError(f"--option takes {wanted}; got {pair!r}.")
        if composed:
            options.setdefault(component, {})[name] = _value(text)
        else:
            options[key] = _value(text)
    return options


def _value(text: str) -> Any:
    """A JSON number, true, false or null, and otherwise the text itself."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else "null" if text == "None" else text)
    except json.JSONDecodeError:
        return text
