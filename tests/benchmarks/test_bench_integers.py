"""The benchmark of integers runs on a tiny model; integers take fewer bytes and choose the tokens of fake rounding."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.harness.byte_tokenizer import build

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_integers.py"
pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="benchmarks/ is not next to the installed package")


@pytest.mark.parametrize("flags", [[], ["--sink", "--clock", "processor"]])
def test_integers_beside_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    model, tokenizer = build("llama")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("A tiny text of many words. " * 20, encoding="utf-8")
    out = tmp_path / "integers.json"
    sizes = [
        "--calibration",
        "64",
        "--lengths",
        "32",
        "--rounds",
        "2",
        "--prompts",
        "4",
        "--prompt",
        "8",
        "--steps",
        "8",
    ]
    files = ["--model", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_integers.py", *files, *sizes, *flags])
    monkeypatch.syspath_prepend(str(BENCH.parent))
    runpy.run_path(str(BENCH), run_name="__main__")
    rows = json.loads(out.read_text())["rows"]
    assert set(rows) == {"fp32", "bf16", "int8, fp32 elsewhere", "int8, bf16 elsewhere"}
    integers = rows["int8, fp32 elsewhere"]
    assert integers["linears_mb"] < 0.4 * rows["fp32"]["linears_mb"]  # tiny rows: their steps and sums count
    assert integers["embeddings_mb"] == rows["fp32"]["embeddings_mb"]
    assert integers["same_tokens"] >= 0.9
    assert all(row["a token"] > 0 < row["prefill 32"] for row in rows.values())
