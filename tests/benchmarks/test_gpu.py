"""The script for a GPU runs every stage on a CPU, finds a wrong kernel, and loses nothing by an error or a crash."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.tables.gpu import NONE, gpu_tables

pytest.importorskip("benchmarks.gpu", reason="benchmarks/ is not next to the installed package")
from benchmarks.gpu import __main__ as script
from benchmarks.gpu import layers, models, record, right
from benchmarks.gpu.record import Cell, Record, supervise

DRY = script.Setup("cpu", True)


def run(folder: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """The exit status, and the rows of the folder."""
    return script.main(["--dry", f"--out={folder}", *arguments]), Record(folder).rows


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
def test_every_stage_writes_its_rows(tmp_path: Path) -> None:
    folder = tmp_path / "card"
    status, rows = run(folder)
    assert status == 0, [row for row in rows if record.is_bad(row)]
    cells = {stage: [row for row in rows if row["stage"] == stage] for stage in script.SHARES}
    named = " ".join(row["cell"] for row in cells["right"])
    assert all(name in named for name in (*right.WIDE, *(f"{dtype}, {case}" for dtype, case in right.CASES)))
    assert any("decoding" in row for row in cells["right"])
    assert any("gradients of new parameters" in row for row in cells["right"])
    assert all(row["right"] for row in cells["right"])
    for stage, variants, kinds in (
        ("layers", layers.VARIANTS, layers.KINDS),
        ("models", models.VARIANTS, models.KINDS),
    ):
        timed = {(row["cell"].split(",")[0], kind) for row in cells[stage] for kind in kinds if f"{kind}_95" in row}
        assert timed >= {(variant, kind) for variant in variants[:: layers.FEWER] for kind in kinds}
    for row in cells["models"]:
        if row["cell"].startswith("convert"):
            assert row["peak_gb"] > 0
            assert row["counted_gb"] > row["weights_gb"] > 0
            assert "distil" in row["steps"]
    assert {row["cell"] for row in cells["integers"]} == {"PyTorch's product, alone", "int8, prefill", "int8, decode"}
    assert json.loads((folder / "machine.json").read_text())["torch"] == torch.__version__
    assert len((folder / "table.md").read_text().splitlines()) == 2 + len(rows)
    assert run(folder) == (0, rows)  # nothing is measured twice
    tables = gpu_tables(_as_of_a_card(folder))
    assert f"Right: {len(cells['right'])} of {len(cells['right'])} cells." in tables
    assert "| outeffhop | " in tables
    assert "| convert, window | " in tables


def _as_of_a_card(folder: Path) -> Path:
    """The folder above, with a card named in machine.json."""
    machine = json.loads((folder / "machine.json").read_text())
    facts = {"card": "a card", "driver": "1", "cuda": "1", "cudnn": 1}
    (folder / "machine.json").write_text(json.dumps(machine | facts))
    return folder.parent


def test_without_figures_the_page_says_so(tmp_path: Path) -> None:
    assert gpu_tables(tmp_path).startswith(NONE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_backward_pass_is_found(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of softmax in place of that of softmax_n: forward passes stay right."""
    arguments = (dtype, "plain", "llama", "outeffhop", DRY)
    assert right.check(*arguments)["right"]
    monkeypatch.setattr(torch, "logaddexp", lambda lse, log_n: lse)
    wrong = right.check(*arguments)
    assert not wrong["right"]
    assert wrong["forward"][0] <= right.TIMES * max(wrong["forward"][1:])
    assert wrong["gradients"][0] > right.TIMES * max(wrong["gradients"][1:])


@pytest.mark.parametrize(
    ("error", "status", "figure"),
    [(RuntimeError("no such kernel"), 1, "error"), (torch.OutOfMemoryError("too large. Try less"), 0, "out_of_memory")],
)
def test_a_cell_that_fails_is_a_row(
    error: Exception, status: int, figure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(layers, "training", fails)
    got, rows = run(tmp_path, "--stages=layers", "--only=window")
    assert got == status
    assert [(row["cell"], figure in row) for row in rows] == [
        (f"window, 24 tokens, {kind}", kind == "train") for kind in layers.KINDS
    ]


def test_a_wrong_result_gives_the_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(right, "check", lambda *_: {"right": False})
    got, rows = run(tmp_path, "--stages=right", "--only=bert")
    assert got == 1
    assert rows


def test_cells_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    got, rows = run(tmp_path, "--minutes=0", "--stages=integers")
    assert got == 0
    assert rows == [{"stage": "integers", "cell": "3 more cells", "left_out": "no time left"}]


def test_a_cell_that_takes_too_long_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_most = record._at_most
    monkeypatch.setattr(record, "_at_most", lambda seconds: at_most(0.05))
    Record(tmp_path).run("layers", Cell("slow", 1, lambda: time.sleep(20) or {}))
    assert "stopped after" in Record(tmp_path).rows[0]["left_out"]


# Cells in a process of their own, with a stand-in for torch, which would take seconds to import.
PROCESS = """
import os, sys, types
from pathlib import Path
from benchmarks.gpu.record import Cell, Record

cuda = types.SimpleNamespace(is_initialized=lambda: False)
sys.modules["torch"] = types.SimpleNamespace(OutOfMemoryError=MemoryError, cuda=cuda)
record = Record(Path(sys.argv[1]))
for name, work in (("dies", os.abort), ("is lost", lambda: sys.exit(75)), ("works", dict)):
    if ("stage", name) not in record.done:
        record.run("stage", Cell(name, 1, work))
"""


def test_a_crash_loses_one_cell(tmp_path: Path) -> None:
    assert supervise([sys.executable, "-c", PROCESS, str(tmp_path)], tmp_path, time.time() + 60) == 0
    rows = {row["cell"]: row for row in Record(tmp_path).rows}
    assert list(rows) == ["dies", "is lost", "works"]
    assert "status -6" in rows["dies"]["error"]
    assert "status 75" in rows["is lost"]["error"]
    assert not record.is_bad(rows["works"])


def test_the_end_of_the_time_is_the_end(tmp_path: Path) -> None:
    hangs = PROCESS.replace("os.abort", "lambda: __import__('time').sleep(60)")
    assert supervise([sys.executable, "-c", hangs, str(tmp_path)], tmp_path, time.time() + 3) == 0
    assert [(row["cell"], row["left_out"]) for row in Record(tmp_path).rows] == [("dies", "the time was up")]


def test_a_process_that_begins_no_cell_is_not_started_again(tmp_path: Path) -> None:
    assert supervise([sys.executable, "-c", "raise SystemExit(75)"], tmp_path, time.time() + 30) == 75
