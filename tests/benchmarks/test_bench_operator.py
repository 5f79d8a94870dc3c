"""The operator's bench: what it times is right, and every operator, slope and picture is there."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")
BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_operator.py"
OWN = ("sdpa", "eager", "softmax_1", "softmax_1 published", "simple")
SMALL = ("--heads=2", "--width=16", "--rounds=1", "--threads=1")
pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="benchmarks/ is not next to the installed package")


@pytest.fixture
def attentions(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return runpy.run_path(str(BENCH.with_name("bench_attentions.py")))


@pytest.mark.parametrize("causal", ["false", "true"])
def test_every_operator(causal: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    out = tmp_path / "figures" / "operator.json"
    flags = (*SMALL, "--lengths=64,16,32,128", "--eager_up_to=64", f"--causal={causal}", "--memory=false")
    monkeypatch.setattr(sys, "argv", ["bench_operator.py", *flags, f"--out={out}"])
    monkeypatch.syspath_prepend(str(BENCH.parent))
    runpy.run_path(str(BENCH), run_name="__main__")
    result, text = json.loads(out.read_text()), capsys.readouterr().out
    seen = {(row["operator"], row["length"]) for row in result["rows"]}
    assert {(name, length) for name in OWN for length in (16, 32, 64)} <= seen
    assert ("softmax_1", 128) in seen
    assert ("eager", 128) not in seen
    assert ("softmax_1 published", 128) not in seen
    for row in result["rows"]:
        for kind in ("forward", "train"):
            assert row[f"{kind}_95"][0] <= row[kind] <= row[f"{kind}_95"][1]
            assert min(row[kind], row[f"{kind}_ms"]) > 0
            assert row["operator"] != "sdpa" or row[kind] == 1
    assert {fit["operator"] for fit in result["slopes"]} >= set(OWN)
    assert all(math.isfinite(fit[kind]) for fit in result["slopes"] for kind in ("forward", "train"))
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "| 128 | simple |" in text
    assert "| slope |" in text


@pytest.mark.parametrize("causal", [False, True])
def test_a_wrong_operator_is_not_timed(causal: bool, attentions: dict[str, Any]) -> None:
    settings = ((1, 2, 64, 16), causal, "cpu", torch.float32)
    for name, operator in attentions["OWN"].items():
        attentions["check"](name, operator, *settings)
    for name, other in (("eager", "softmax_1"), ("softmax_1", "eager"), ("simple", "sdpa")):
        with pytest.raises(AssertionError, match=f"{name}: "):
            attentions["check"](name, attentions["OWN"][other], *settings)
