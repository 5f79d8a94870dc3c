import re
from collections.abc import Callable
from typing import Any

import pytest

from hf_attn_swap.text.typed import parse_count, parse_layers, parse_options, parse_share


@pytest.mark.parametrize(
    ("text", "layers"),
    [(None, None), ("0", [0]), ("0-5,7", [0, 1, 2, 3, 4, 5, 7]), (" 3 , 1-2,2", [1, 2, 3]), ("4-4", [4])],
)
def test_layers(text: str | None, layers: list[int] | None) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "1-2-3", "0.5"])
def test_layers_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        parse_layers(text)


@pytest.mark.parametrize(
    ("parse", "text", "number"),
    [
        *((parse_count, text, number) for text, number in (("300k", 300_000), ("1.5M", 1_500_000), ("0", 0))),
        *((parse_share, text, share) for text, share in (("2%", 0.02), ("0.02", 0.02), (" 100% ", 1.0), (None, None))),
    ],
)
def test_numbers(parse: Callable[[Any], float | None], text: str | None, number: float | None) -> None:
    assert parse(text) == number


def test_refused_numbers() -> None:
    for text in ("", "k", "many", "-3", "1e400k", "nan"):
        with pytest.raises(ValueError, match="such as 300k"):
            parse_count(text)
    for text in ("", "%", "little", "-1%", "0", "2", "150%", "nan", "inf"):
        with pytest.raises(ValueError, match="such as 2%"):
            parse_share(text)


def test_options_of_one_variant_are_flat() -> None:
    pairs = ["alpha=0.5", "init=first", "flag=True", "none=None", "n=3", "json=true", "text=a=b"]
    expected = {"alpha": 0.5, "init": "first", "flag": True, "none": None, "n": 3, "json": True, "text": "a=b"}
    assert parse_options(pairs, composed=False) == expected


def test_options_of_a_composition_belong_to_components() -> None:
    pairs = ["modern_hopfield.alpha=0.5", "modern_hopfield.init=first", "gated.kind=mlp"]
    expected = {"modern_hopfield": {"alpha": 0.5, "init": "first"}, "gated": {"kind": "mlp"}}
    assert parse_options(pairs, composed=True) == expected


@pytest.mark.parametrize(
    ("pair", "composed"),
    [
        ("alpha", False),
        ("=1", False),
        ("a.b=1", False),
        ("alpha=1", True),
        ("modern_hopfield.=1", True),
        (".alpha=1", True),
    ],
)
def test_options_of_another_form_are_refused(pair: str, composed: bool) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(pair))):
        parse_options([pair], composed=composed)
