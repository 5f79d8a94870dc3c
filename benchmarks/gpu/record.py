"""Runs cells, and writes the figures of each as soon as it ends: a line of figures.jsonl and a row of table.md.

A cell whose row is there already is not run again, so a second run with the same folder goes on where the first one
ended. The process that only waits for cells uses this file, too, so torch is imported where cells run.
"""

from __future__ import annotations

import contextlib
import gc
import json
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOST = 75  # the exit status of a process whose GPU no longer answers
FIGURES, TABLE, RUNNING = "figures.jsonl", "table.md", "running.json"


@dataclass(frozen=True)
class Cell:
    """What is measured at once.

    Attributes:
        name: unique in its stage.
        seconds: about how long it takes; it is not begun with less time left, and stopped after far more.
        work: measures, and returns the figures.
    """

    name: str
    seconds: float
    work: Callable[[], dict[str, Any]]


def is_bad(row: dict[str, Any]) -> bool:
    """True for an error and for a wrong result. Too little memory or time is neither."""
    return "error" in row or row.get("right") is False


class Record:
    """The rows of a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        lines = (folder / FIGURES).read_text("utf-8").splitlines() if (folder / FIGURES).exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.done = {(row["stage"], row["cell"]) for row in self.rows}

    def write(self, stage: str, cell: str, **figures: Any) -> None:
        """Write one row."""
        row = {"stage": stage, "cell": cell, **figures}
        self.rows.append(row)
        self.done.add((stage, cell))
        self._append(FIGURES, json.dumps(row))
        if len(self.rows) == 1:
            self._append(TABLE, "| stage | cell | figures |\n| --- | --- | --- |")
        shown = "; ".join(f"{name} {_shown(value)}" for name, value in figures.items() if name != "trace")
        self._append(TABLE, f"| {stage} | {cell} | {shown.replace('|', '/')} |")
        print(f"{stage}: {cell}: {shown}", flush=True)

    def _append(self, name: str, line: str) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def run(self, stage: str, cell: Cell) -> None:
        """Run one cell, and write its figures or its error.

        Raises:
            SystemExit: the GPU no longer answers, with the status `LOST`.
        """
        import torch

        (self.folder / RUNNING).write_text(json.dumps([stage, cell.name]))
        start, failed = time.perf_counter(), True
        try:
            with _at_most(max(60.0, 4 * cell.seconds)):
                figures = cell.work()
            failed = False
        except torch.OutOfMemoryError as error:
            figures = {"out_of_memory": str(error).partition(". ")[0]}
            traceback.clear_frames(error.__traceback__)  # they hold tensors
        except TimeoutError as error:
            figures = {"left_out": str(error)}
        except Exception as error:  # noqa: BLE001  # a row says it, and the other cells go on
            words = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            figures = {"error": words, "trace": traceback.format_exc()[-2000:]}
            traceback.clear_frames(error.__traceback__)
        self.write(stage, cell.name, **figures, seconds=round(time.perf_counter() - start, 1))
        (self.folder / RUNNING).unlink()
        if failed:
            gc.collect()
        if failed and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except RuntimeError:
                sys.exit(LOST)


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Inside, a TimeoutError is raised after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds:.0f} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def supervise(command: list[str], folder: Path, until: float) -> int:
    """Run a command that runs cells, and run it again for the cells that are left if a cell broke its process.

    Args:
        command: runs the cells that have no row in the folder.
        folder: the folder of the record.
        until: when the command is killed, in seconds since the epoch.

    Returns:
        The exit status of the last process; 0 after a kill, because the time was up.
    """
    while True:
        rows = len(Record(folder).rows)
        try:
            status = subprocess.run(command, check=False, timeout=max(1.0, until - time.time())).returncode
            why = {"error": f"the process ended with the status {status}"}
        except subprocess.TimeoutExpired:
            status, why = 0, {"left_out": "the time was up"}
        record, running = Record(folder), folder / RUNNING
        if running.exists():
            record.write(*json.loads(running.read_text()), **why)
            running.unlink()
        if "left_out" in why or len(record.rows) == rows or not (status == LOST or status < 0):
            return status


def _shown(value: Any) -> str:
    """A figure as text."""
    if isinstance(value, (list, tuple)):
        return " / ".join(map(_shown, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)
