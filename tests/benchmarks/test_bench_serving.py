"""The benchmark of serving runs on small models, and only the layers with softmax have a cache that grows."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_serving.py"
pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="benchmarks/ is not next to the installed package")


def test_stock_beside_a_hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "serving.json"
    sizes = {"layers": 3, "linear": 2, "context": 1200, "batch": 2, "tokens": 2, "rounds": 2, "vocabulary": 50}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["bench_serving.py", *flags, "--out", str(out)])
    monkeypatch.syspath_prepend(str(BENCH.parent))
    chosen = runpy.run_path(str(BENCH), run_name="__main__")["chosen"]
    stock, hybrid = json.loads(out.read_text())["rows"]
    assert (stock["model"], hybrid["model"]) == ("stock", "hybrid")
    assert stock["weights_mb"] == hybrid["weights_mb"] > 0
    assert stock["cache_mb"] / 3 < hybrid["cache_mb"] < 0.6 * stock["cache_mb"]
    for row in (stock, hybrid):
        assert row["generate_95"][0] <= row["generate"] <= row["generate_95"][1]
        assert row["tokens_per_second"] == pytest.approx(1e3 * 2 * 2 / row["generate_ms"])
    assert chosen(3, 2) == [0, 2]
    assert len(chosen(30, 23)) == 23
