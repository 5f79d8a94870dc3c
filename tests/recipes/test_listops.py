"""ListOps: values by hand and of the published file, every refusal, and what the generator draws."""

from __future__ import annotations

import importlib
import random
from collections import Counter
from typing import Any

import pytest

from tests.harness.recipes import RECIPES, needs_recipes

pytestmark = needs_recipes


@pytest.fixture
def listops(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("listops")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("[MIN 4 7 ]", 4),
        ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9),
        ("[MED 9 1 5 ]", 5),
        ("[MED 4 1 ]", 2),  # 2.5
        ("[MED 9 2 4 7 ]", 5),  # 5.5
        ("[MED 3 3 8 9 ]", 5),  # 5.5
        ("[SM 5 6 9 ]", 0),
        ("[SM 8 [SM 9 9 ] [MED 0 3 ] [MAX 1 [MIN 6 5 ] ] ]", 2),  # 8 + 8 + 1 + 5
        ("[MAX 3 ]", 3),
        ("( ( ( [MAX 2 ) ( ( ( [SM 5 ) 9 ) ] ) ) ] )", 4),
    ],
)
def test_values_by_hand(text: str, value: int, listops: Any) -> None:
    assert listops.value(text) == value


def test_the_grammar(listops: Any) -> None:
    """On two levels: an operation at one node in four, of four kinds, with 2 to 4 digits, all equally often."""
    generator = random.Random(0)
    drawn = [listops.draw(generator, 100, 2, 4) for _ in range(20_000)]
    operations = [words for words in drawn if len(words) > 1]
    assert len(operations) / len(drawn) == pytest.approx(0.25, abs=0.015)
    names, counts = Counter(words[0] for words in operations), Counter(len(words) - 2 for words in operations)
    assert set(names) == set(listops.OPERATORS)
    assert set(counts) == {2, 3, 4}
    for result in (names, counts):
        assert min(result.values()) / max(result.values()) > 0.85
    digits = Counter(word for words in operations for word in words[1:-1])
    assert set(digits) == set("0123456789")
    assert {len(listops.draw(generator, 100, 1, 4)) for _ in range(100)} == {1}


def test_depth_and_arguments_are_bounded(listops: Any) -> None:
    for text in listops.expressions(100, 30, 200, max_depth=4, max_args=5):
        depth, deepest, arguments = 0, 0, [0]
        for word in text.split():
            if word == "]":
                depth -= 1
                assert 2 <= arguments.pop() <= 5
                continue
            arguments[-1] += 1
            if word in listops.OPERATORS:
                depth += 1
                deepest = max(deepest, depth)
                arguments.append(0)
        assert depth == 0
        assert deepest <= 3, "the fourth level holds digits only"
