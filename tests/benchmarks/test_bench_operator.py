"""The operator's bench: what it times is right, and every operator, slope and picture is there."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
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
    found, text = json.loads(out.read_text()), capsys.readouterr().out
    seen = {(row["operator"], row["length"]) for row in found["rows"]}
    assert {(name, length) for name in OWN for length in (16, 32, 64)} <= seen
    assert ("softmax_1", 128) in seen
    assert ("eager", 128) not in seen
    assert ("softmax_1 published", 128) not in seen
    for row in found["rows"]:
        for kind in ("forward", "train"):
            assert row[f"{kind}_95"][0] <= row[kind] <= row[f"{kind}_95"][1]
            assert min(row[kind], row[f"{kind}_ms"]) > 0
            assert row["operator"] != "sdpa" or row[kind] == 1
    assert {fit["operator"] for fit in found["slopes"]} >= set(OWN)
    assert all(math.isfinite(fit[kind]) for fit in found["slopes"] for kind in ("forward", "train"))
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


def test_softmax_1_without_the_kernel(attentions: dict[str, Any], monkeypatch: Any) -> None:
    monkeypatch.setitem(attentions["softmax_1"].__globals__, "fits", lambda *_: False)
    for causal in (False, True):
        attentions["check"]("softmax_1", attentions["softmax_1"], (2, 2, 64, 16), causal, "cpu", torch.float32)


def test_a_peer_that_refuses_is_left_out(monkeypatch: Any) -> None:
    def refuses(*_: Any) -> torch.Tensor:
        raise RuntimeError("not on this device")

    monkeypatch.syspath_prepend(str(BENCH.parent))
    bench = runpy.run_path(str(BENCH))
    monkeypatch.setitem(bench["usable"].__globals__, "peers", lambda: {"peer": refuses})
    left_out: list[dict[str, Any]] = []
    assert tuple(bench["usable"](16, bench["Options"](heads=1, width=8), left_out)) == OWN
    assert left_out == [{"operator": "peer", "length": 16, "why": "not on this device"}]


@pytest.mark.slow  # a process per operator
def test_memory(tmp_path: Path) -> None:
    out = tmp_path / "operator.json"
    flags = (*SMALL, "--lengths=1024", f"--out={out}")
    done = subprocess.run([sys.executable, str(BENCH), *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peaks = {row["operator"]: row["peak_mb"] for row in json.loads(out.read_text())["rows"]}
    assert peaks["eager"] > 8 > peaks["softmax_1"] >= 0, "two heads' scores of 1024 x 1024 take 8 MB"
