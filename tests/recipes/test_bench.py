"""The bench runs end to end on a tiny shape and reports every variant it was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "recipes" / "bench.py"


@pytest.mark.slow  # a process per model
def test_bench_reports_every_cell(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    flags = ["--models=gpt2", "--shapes=2x16", "--variants=belief", "--width=64", "--layers=1", "--rounds=2"]
    done = subprocess.run(
        [sys.executable, str(BENCH), *flags, f"--out={out}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    names = ["stock", "stock again", "belief"]
    assert [(row["model"], row["variant"]) for row in rows] == [(m, n) for m in ("gpt2",) for n in names]
    for row in rows:
        assert row["forward"] > 0
        assert row["train_95"][0] <= row["train"] <= row["train_95"][1]
        assert row["variant"] in done.stdout
    assert all(row["forward"] == 1 for row in rows if row["variant"] == "stock")
