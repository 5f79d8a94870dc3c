"""The check and the bench for a GPU run on a CPU too, and the check finds a wrong kernel."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_gpu.py"
TINY = ("--device=cpu", "--width=64", "--layers=1", "--rounds=1", "--threads=1", "--memory=false", "--shapes=1x16")
pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="benchmarks/ is not next to the installed package")


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", *arguments])
    monkeypatch.syspath_prepend(str(BENCH.parent))
    runpy.run_path(str(BENCH), run_name="__main__")


def test_every_variant_is_checked_and_measured(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "out.json"
    run([*TINY, "--checks=2x14", "--models=bert,llama", "--kinds=forward,decode", f"--out={out}"], monkeypatch)
    result, text = json.loads(out.read_text()), capsys.readouterr().out
    variants = result["options"]["variants"].split(",")
    rows = {(row["model"], row["dtype"], row["padded"], row["variant"]): row for row in result["check"]}
    assert len(rows) == len(result["check"]) == 2 * 2 * 2 * len(variants)
    for (model, *_), row in rows.items():
        assert row["equal"], row
        jumps = "sparsemax" in row["variant"] and row["dtype"] == "bfloat16"
        kinds = {"forward"} | ({"gradients"} if not jumps else set()) | ({"decoding"} if model == "llama" else set())
        assert set(row["times"]) == kinds
        assert f"| {row['variant']} | {row['form']} |" in text
    wanted = {(model, name) for model in ("bert", "llama") for name in ("stock", "stock again", *variants)}
    for dtype in ("float32", "bfloat16"):
        assert {(row["model"], row["variant"]) for row in result["times"][dtype]} == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_backward_pass_is_found(dtype: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The gradient of softmax in place of that of softmax_n: forward passes stay right."""
    monkeypatch.setattr(torch, "logaddexp", lambda lse, log_n: lse)
    flags = ["--models=llama", "--variants=softmax,outeffhop", "--kinds=forward", f"--dtypes={dtype}"]
    with pytest.raises(SystemExit, match=rf"Not equal to the readable formula: outeffhop \(llama, {dtype}\)\. Please"):
        run([*TINY, *flags, "--checks=4x12", f"--out={tmp_path / 'out.json'}"], monkeypatch)
    assert "| NO |" in capsys.readouterr().out
