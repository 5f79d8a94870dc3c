"""Every file that faults are put into has tests that belong to it, and every name in the table of these is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from . import run


def test_every_file_has_tests() -> None:
    found = run.sources(run.ROOT)
    assert len(found) > 50
    for path in found:
        assert run.tests_of(path.relative_to(run.ROOT / run.PACKAGE)), f"{path}: name its tests in TESTS"


@pytest.mark.parametrize("name", run.TESTS)
def test_every_name_is_there(name: str) -> None:
    assert (run.ROOT / run.PACKAGE / name).exists()
    assert all((run.ROOT / path).is_file() for each in run.TESTS[name] for path in each.paths)


def test_a_file_without_an_entry_has_the_tests_of_its_folder() -> None:
    assert run.tests_of(Path("kernels/new.py")) == run.TESTS["kernels/"]
