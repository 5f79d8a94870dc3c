"""The comparison of two trees divides the times of this tree by those of the commit."""

from __future__ import annotations

import argparse
import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

BENCHES = Path(__file__).parents[2] / "benchmarks"
TINY = ("--width=64", "--layers=1", "--rounds=1", "--threads=1", "--models=bert", "--kinds=forward", "--shapes=1x16")
pytestmark = pytest.mark.skipif(not BENCHES.exists(), reason="benchmarks/ is not next to the installed package")


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCHES))
    return runpy.run_path(str(BENCHES / f"{name}.py"))


def run(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    monkeypatch.syspath_prepend(str(BENCHES))
    runpy.run_path(str(BENCHES / f"{name}.py"), run_name="__main__")


class Fake:
    """A process whose passes take a given time."""

    def __init__(self, taken: float) -> None:
        self.taken = taken

    def seconds(self, *what: str) -> float:
        return self.taken


def test_ratios_are_this_tree_to_the_commit(monkeypatch: Any) -> None:
    compare = loaded("bench_compare", monkeypatch)
    given = argparse.Namespace(kinds="forward,decode", rounds=3)
    workers = {compare["NOW"]: Fake(0.3), compare["AGAIN"]: Fake(0.6), compare["THEN"]: Fake(0.1)}
    row = compare["measure"](workers, ("llama", "1x16", "belief"), given)
    for kind in ("forward", "decode"):
        assert row[kind] == pytest.approx(3)
        assert row[f"{kind}_noise_95"] == pytest.approx((2, 2))
    text = compare["table"]([row])
    assert "| llama 1x16 | belief | 3.00 [3.00, 3.00] | [2.00, 2.00] | 3.00" in text


@pytest.mark.slow  # a process per tree, and the files of a commit
def test_two_trees_in_one_run(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    if not (BENCHES.parent / ".git").exists():
        pytest.skip("this folder is no git checkout")
    compare = loaded("bench_compare", monkeypatch)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    out = tmp_path / "compare.json"
    run("bench_compare", ["HEAD", *TINY, "--variants=belief,unheard", f"--out={out}"], monkeypatch)
    (row,) = json.loads(out.read_text())["rows"]
    assert row["variant"] == "belief"
    assert row["forward_95"][0] <= row["forward"] <= row["forward_95"][1]
    assert "Not in both trees, so not measured: unheard." in capsys.readouterr().out
    assert str(tmp_path) not in compare["git"]("worktree", "list"), "the tree of the commit is removed"
    with pytest.raises(SystemExit, match=r"the process for .* imported "):
        compare["Worker"](tmp_path, ["HEAD", *TINY])
