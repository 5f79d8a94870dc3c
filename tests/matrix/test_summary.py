"""What the canary says: the cells and the test files that broke, and that something did not run at all."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("summary.py")
TESTS = """
import pytest

def test_right():
    pass

@pytest.mark.parametrize("number", range(2))
def test_wrong(number):
    assert number == "a|b"

@pytest.mark.skip(reason="no device")
def test_left_out():
    pass
"""


def cell(variant: str, result: str) -> list[str]:
    return ["llama", variant, result]


def summary(folder: Path) -> str:
    command = [sys.executable, str(SCRIPT), "newest", str(folder / "doctor.json"), str(folder / "tests.xml")]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_nothing_ran(tmp_path: Path) -> None:
    said = summary(tmp_path)
    assert "The doctor gave no answer" in said
    assert "The tests did not run to their end" in said
    (tmp_path / "doctor.json").write_text("")
    (tmp_path / "tests.xml").write_text("")
    assert summary(tmp_path) == said


def test_what_broke(tmp_path: Path) -> None:
    packages = [["transformers", "5.25.0", "5.24.0", "newer than tested"]]
    cells = [cell("belief", "right"), cell("simpletron", "WRONG: other outputs")]
    (tmp_path / "doctor.json").write_text(json.dumps({"packages": packages, "cells": cells}))
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text(TESTS)
    (tmp_path / "tests" / "test_two.py").write_text("import nothing_of_this_name")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    done = subprocess.run([*command, "--junitxml=tests.xml", "tests"], cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 1
    said = summary(tmp_path)
    assert "Installed: transformers 5.25.0." in said
    assert "**1 of 2 cells are wrong**" in said
    assert "| llama | simpletron | WRONG: other outputs |" in said
    assert "belief" not in said
    assert "Tests: 1 passed, 1 skipped, **3 failed**." in said
    assert "| tests/test_one.py | 2 | test_wrong[0]: " in said
    assert "a\\|b" in said
    assert "| tests/test_two.py | 1 | " in said


def test_all_right(tmp_path: Path) -> None:
    (tmp_path / "doctor.json").write_text(json.dumps({"packages": [], "cells": [cell("belief", "right")]}))
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite><testcase classname="a" name="b"/></testsuite></testsuites>'
    )
    said = summary(tmp_path)
    assert "no cell is wrong" in said
    assert "1 passed, 0 skipped, 0 failed" in said
    assert "|" not in said
