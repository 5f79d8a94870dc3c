"""ListOps: values by hand and of the published file, every refusal, and what the generator draws."""

from __future__ import annotations

import importlib
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
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


def test_files(tmp_path: Path, listops: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def make(*flags: str) -> dict[str, Any]:
        bounds = ("--min_length", "5", "--max_length", "30", "--max_depth", "5", "--max_args", "6")
        monkeypatch.setattr(sys, "argv", ["listops.py", str(tmp_path), *bounds, "--test", "12", *flags])
        listops.main()
        return {name: datasets.Dataset.from_parquet(str(tmp_path / f"{name}.parquet")) for name in ("train", "test")}

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    result = make("--train", "40")
    texts = {name: split["text"][:] for name, split in result.items()}
    assert (len(set(texts["train"])), len(set(texts["test"]))) == (40, 12)
    assert not set(texts["train"]) & set(texts["test"])
    for split in result.values():
        assert split.column_names == ["text", "label"]
        assert split.features["label"].names == list("0123456789")
        assert split["label"][:] == [listops.value(text) for text in split["text"]]
    assert make("--train", "20")["test"]["text"][:] == texts["test"], "the held-out rows do not depend on --train"
    assert "test.parquet: 12 rows" in capsys.readouterr().out
    for flags, message in ((("--train", "0"), "must be at least 1, got 0 and 12"), (("--max_args", "1"), "max_args")):
        with pytest.raises(SystemExit):
            make(*flags)
        assert message in capsys.readouterr().err
