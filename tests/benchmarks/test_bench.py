"""The bench runs end to end on tiny shapes and reports every model, variant and kind of pass that it was asked for."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench.py"
SMALL = ("--width=64", "--layers=1", "--rounds=1", "--threads=1")
KINDS = {"forward", "train", "prefill", "decode"}
pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="benchmarks/ is not next to the installed package")


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", *SMALL, *arguments])
    monkeypatch.syspath_prepend(str(BENCH.parent))
    runpy.run_path(str(BENCH), run_name="__main__")


def test_every_model_and_kind(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "bench.json"
    flags = ["--models=bert,gpt2,llama,vit", f"--kinds={','.join(sorted(KINDS))}", "--shapes=1x16,1x32,1x64"]
    run([*flags, "--variants=simpletron", "--memory=false", f"--out={out}"], monkeypatch)
    result, text = json.loads(out.read_text()), capsys.readouterr().out
    assert len(result["rows"]) == 4 * 3 * 3
    assert len(result["slopes"]) == 4 * 3
    for row in (*result["rows"], *result["slopes"]):
        assert KINDS & set(row) == (KINDS if row["model"] in ("gpt2", "llama") else {"forward", "train"})
    for row in result["rows"]:
        for kind in KINDS & set(row):
            assert row[f"{kind}_95"][0] <= row[kind] <= row[f"{kind}_95"][1]
            assert min(row[kind], row[f"{kind}_ms"]) > 0
            assert row["variant"] != "stock" or row[kind] == 1
    for fit in result["slopes"]:
        assert fit["lengths"] == ([17, 37, 65] if fit["model"] == "vit" else [16, 32, 64])
        assert all(math.isfinite(fit[kind]) for kind in KINDS & set(fit))
    assert "| llama 1x64 | stock again |" in text
    assert "| vit 1 x 17-65 | simpletron |" in text


def test_slope_is_that_of_the_power(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    slope = runpy.run_path(str(BENCH.parent / "bench_figures.py"))["slope"]
    assert slope([16, 64, 128, 4096], [3 * n**2 for n in (16, 64, 128, 4096)]) == pytest.approx(2)
    assert slope([1, 2, 4], [5, 5, 5]) == pytest.approx(0)


def test_a_step_of_decoding_starts_from_the_same_cache(monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    models = runpy.run_path(str(BENCH.parent / "bench_models.py"))
    for name in ("gpt2", "llama"):
        model, given = models["build"](name, 8, 1, 64), {"input_ids": models["torch"].zeros(1, 8, dtype=int)}
        cache = models["filled"](model, given)
        for _ in range(2):
            assert models["seconds"](model, given, "decode", cache) > 0
            assert cache.get_seq_length() == 8


@pytest.mark.slow  # a process per model
def test_bench_reports_every_cell(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    flags = ["--models=gpt2,vit", "--shapes=2x16", "--variants=belief", *SMALL]
    done = subprocess.run(
        [sys.executable, str(BENCH), *flags, f"--out={out}"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["rows"]
    names = ["stock", "stock again", "belief"]
    assert [(row["model"], row["variant"]) for row in rows] == [(m, n) for m in ("gpt2", "vit") for n in names]
    for row in rows:
        assert row["forward"] > 0
        assert row["train_95"][0] <= row["train"] <= row["train_95"][1]
        assert row["peak_mb"] >= 0
        assert row["variant"] in done.stdout
    assert all(row["forward"] == 1 for row in rows if row["variant"] == "stock")
