"""`pytest --shard K/N`: the parts together are all tests, each once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import pytest_collection_modifyitems

PARTS = 4
TESTS = [f"tests/test_file.py::test_alone[{number}]" for number in range(400)]


def item(name: str) -> Any:
    """A test with this name."""
    return SimpleNamespace(nodeid=name)


def chosen(shard: str | None) -> tuple[list[str], list[str]]:
    """The names of the tests that run, and of those that pytest is told are left out."""
    items, left_out = [item(name) for name in TESTS], []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(test.nodeid for test in items))
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: shard, hook=hook), items)  # type: ignore[arg-type]  # as much of it as is asked
    return [test.nodeid for test in items], left_out


def test_all_tests_once() -> None:
    parts = [chosen(f"{part}/{PARTS}") for part in range(1, PARTS + 1)]
    assert sorted(name for runs, _ in parts for name in runs) == sorted(TESTS)
    for runs, left_out in parts:
        assert sorted(runs + left_out) == sorted(TESTS)
        assert len(set(runs) & set(TESTS)) == pytest.approx(len(TESTS) / PARTS, rel=0.2)
    assert chosen("2/4") == parts[1]


def test_without_the_option() -> None:
    assert chosen(None) == (TESTS, [])


@pytest.mark.parametrize("shard", ["0/4", "5/4", "4", "a/b", "1/0"])
def test_other_parts_are_refused(shard: str) -> None:
    with pytest.raises(pytest.UsageError, match="--shard takes K/N"):
        chosen(shard)
