"""`pytest --shard K/N`: the parts together are all tests, each once, and a group of tests stays together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import TOGETHER as FOLDERS
from tests.conftest import pytest_collection_modifyitems, pytest_xdist_make_scheduler

ROOT = Path(__file__).parents[2]
PARTS = 4
FOLDER = FOLDERS[0]
ALONE = [f"tests/test_file.py::test_alone[{number}]" for number in range(400)]
TOGETHER = [f"{FOLDER}test_{name}.py::test_together" for name in ("one", "two", "three", "four", "five")]


def item(name: str) -> Any:
    """A test with this name."""
    return SimpleNamespace(nodeid=name)


def chosen(shard: str | None) -> tuple[list[str], list[str]]:
    """The names of the tests that run, and of those that pytest is told are left out."""
    items, left_out = [item(name) for name in (*ALONE, *TOGETHER)], []
    hook = SimpleNamespace(pytest_deselected=lambda items: left_out.extend(test.nodeid for test in items))
    pytest_collection_modifyitems(SimpleNamespace(getoption=lambda name: shard, hook=hook), items)  # type: ignore[arg-type]  # as much of it as is asked
    return [test.nodeid for test in items], left_out


def test_all_tests_once() -> None:
    parts = [chosen(f"{part}/{PARTS}") for part in range(1, PARTS + 1)]
    assert sorted(name for runs, _ in parts for name in runs) == sorted((*ALONE, *TOGETHER))
    for runs, left_out in parts:
        assert sorted(runs + left_out) == sorted((*ALONE, *TOGETHER))
        assert len(set(runs) & set(ALONE)) == pytest.approx(len(ALONE) / PARTS, rel=0.2)
        assert len(set(runs) & set(TOGETHER)) in (0, len(TOGETHER))
    assert chosen("2/4") == parts[1]


def test_without_the_option() -> None:
    assert chosen(None) == ([*ALONE, *TOGETHER], [])


@pytest.mark.parametrize("shard", ["0/4", "5/4", "4", "a/b", "1/0"])
def test_other_parts_are_refused(shard: str) -> None:
    with pytest.raises(pytest.UsageError, match="--shard takes K/N"):
        chosen(shard)


def test_one_worker_runs_a_folder() -> None:
    config = SimpleNamespace(getoption=lambda name: "loadgroup", getvalue=lambda name: ["2*popen"])
    scheduler = pytest_xdist_make_scheduler(config, None)  # type: ignore[arg-type]  # as much of it as is asked
    assert {scheduler._split_scope(name) for name in TOGETHER} == {FOLDER}
    assert [scheduler._split_scope(name) for name in ALONE] == ALONE
    assert all(list((ROOT / folder).glob("test_*.py")) for folder in FOLDERS)
