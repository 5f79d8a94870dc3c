"""What a user types: text such as "0-5,7" becomes arguments of `patch_model`; and how to install an extra."""

from __future__ import annotations

import json
import os
from typing import Any


def install(extra: str) -> str:
    """The command that installs an extra of this package; it needs no release."""
    return f'pip install "hf-attn-swap[{extra}] @ git+https://github.com/hf-attn-swap/hf-attn-swap"'


def parse_layers(text: str | None) -> list[int] | None:
    """Turn "0-5,7" into [0, 1, 2, 3, 4, 5, 7]. None stays None, which means all layers.

    Raises:
        ValueError: `text` is not a list of numbers and ranges.
    """
    if text is None:
        return None
    layers: set[int] = set()
    for bounds in text.split(","):
        first, dash, last = (bound.strip() for bound in bounds.partition("-"))
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise ValueError(f'--layers takes numbers and ranges such as "0-5,7", got {text!r}.')
        layers.update(range(int(first), int(last if dash else first) + 1))
    return sorted(layers)


def parse_count(text: str) -> int:
    """Turn "300k", "1.5M" or "20000" into a number.

    Raises:
        ValueError: `text` is no such number, or below 0.
    """
    scale = {"k": 1_000, "m": 1_000_000}.get(text.strip()[-1:].lower())
    try:
        number = round(float(text.strip()[:-1]) * scale) if scale else int(text)
    except (ValueError, OverflowError):
        number = -1
    if number < 0:
        raise ValueError(f"a number such as 300k, 1.5M or 20000 was expected, got {text!r}.")
    return number


def parse_share(text: str | None) -> float | None:
    """Turn "2%" or "0.02" into 0.02. None stays None.

    Raises:
        ValueError: `text` is no such number, not above 0, or above 1: who writes 2 means 2%, most likely.
    """
    if text is None:
        return None
    words = text.strip()
    try:
        share = float(words[:-1]) / 100 if words.endswith("%") else float(words)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError(f"a share such as 2% or 0.02 was expected, at most 100%, got {text!r}.")
    return share


def parse_options(pairs: list[str], *, composed: bool) -> dict[str, Any]:
    """Turn pairs such as "key=value" into keyword arguments of `patch_model`.

    Args:
        pairs: the pairs. In a composition each key starts with the variant's name, as in "gated.kind=mlp".
        composed: True if the variant is a composition. The result then has one dict per variant.

    Raises:
        ValueError: a pair has another form.
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
    """The value that `text` states as JSON or as Python's True, False or None; otherwise `text` itself."""
    constants = {"True": True, "False": False, "None": None}
    if text in constants:
        return constants[text]
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def refuse_name(value: Any, argument: str) -> None:
    """Refuse the name of a tokenizer or an image processor where the object is wanted.

    Raises:
        ValueError: the value is a name or a path; the sentence says what to pass.
    """
    if isinstance(value, (str, os.PathLike)):
        name = os.fspath(value)
        raise ValueError(
            f"{argument} must be a loaded tokenizer or image processor, got the name {name!r}; pass "
            f"AutoTokenizer.from_pretrained({name!r}), or AutoImageProcessor for images."
        )
