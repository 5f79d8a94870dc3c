"""Every file that faults are put into has tests that belong to it, and every name in the table of these is there."""

from __future__ import annotations

from pathlib import Path

from . import run


def test_every_file_has_tests() -> None:
    found = run.sources(run.ROOT)
    assert len(found) > 40
    for path in found:
        assert run.tests_of(path.relative_to(run.ROOT / run.PACKAGE)), f"{path}: name its tests in TESTS"


def test_every_name_is_there() -> None:
    assert not [name for name in run.TESTS if not (run.ROOT / run.PACKAGE / name).exists()]
    paths = {path for stages in run.TESTS.values() for stage in stages for path in stage.paths}
    assert not [path for path in paths if not (run.ROOT / path).is_file()]


def test_a_file_without_an_entry_has_the_tests_of_its_folder() -> None:
    assert run.tests_of(Path("kernels/new.py")) == run.TESTS["kernels/"]
