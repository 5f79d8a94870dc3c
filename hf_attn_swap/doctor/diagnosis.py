"""The result of the doctor, as tables for a terminal, a notebook and an issue, and the function that makes it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers.utils import logging as logs

from ..families import FAMILIES
from ..layer.registry import list_variants
from ..tested import LOGGER
from ..text.table import Table
from .cells import CHECKS, Cell, broken, check_cell
from .installed import Package, installed
from .models import tiny


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What is installed, and which attention is right on which family here.

    Attributes:
        packages: what is installed beside what was tested.
        device: the device of the check, such as "cuda (NVIDIA H100)".
        cells: one result per family and variant.
        seconds: how long the check took.
    """

    packages: tuple[Package, ...]
    device: str
    cells: tuple[Cell, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if no cell is wrong and at least one is right."""
        results = {cell.result for cell in self.cells}
        return "right" in results and "wrong" not in results

    def __str__(self) -> str:
        return "\n".join([self.versions().text(), "", self.table().text(), *self.sentences()])

    def _repr_html_(self) -> str:
        below = Table(summary="", header=("found",), rows=[(sentence,) for sentence in self.sentences()])
        return self.versions().html() + self.table().html() + (below.html() if below.rows else "")

    def summary(self) -> str:
        """One sentence: how many cells are right, refused and wrong, where, and how long the check took."""
        right, refused, wrong = (
            sum(cell.result == result for cell in self.cells) for result in ("right", "refused", "wrong")
        )
        return (
            f"{right} of {len(self.cells)} cells right, {refused} refused, {wrong} wrong; on {self.device} in fp32, "
            f"{self.seconds:.0f} s"
        )

    def versions(self) -> Table:
        """The packages as a table."""
        rows = [(each.name, each.installed, each.tested, each.note) for each in self.packages]
        return Table(
            summary="Installed, and tested with this release", header=("", "installed", "tested", ""), rows=rows
        )

    def table(self) -> Table:
        """The cells as a table: a row per variant, a column per family."""
        families = list(dict.fromkeys(cell.family for cell in self.cells))
        rows: dict[str, dict[str, str]] = {}
        for cell in self.cells:
            rows.setdefault(cell.variant, {})[cell.family] = cell.words
        lines = [(variant, *(found.get(family, "-") for family in families)) for variant, found in rows.items()]
        return Table(summary=self.summary(), header=("", *families), rows=lines)

    def sentences(self) -> tuple[str, ...]:
        """What was refused and what is wrong: one sentence per reason, with the cells that have it."""
        found: dict[tuple[str, str], list[str]] = {}
        for cell in self.cells:
            where = f"{cell.variant} on {cell.family}"
            if cell.refused is not None:
                found.setdefault(("refused", cell.refused), []).append(where)
            for check in cell.wrong:
                held = CHECKS[check.name].words if check.name in CHECKS else "the model can be built and patched"
                found.setdefault((f"WRONG: {check.name} ({held})", str(check.wrong)), []).append(where)
        return tuple(f"{start}: {', '.join(where)}: {reason}" for (start, reason), where in found.items())

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data: dicts, tuples, strings and numbers."""
        cells = [{**asdict(cell), "result": cell.result} for cell in self.cells]
        return {"ok": self.ok, **asdict(self), "cells": cells}


def doctor(*, device: str | None = None) -> Diagnosis:
    """Check this installation: every variant on a tiny random model of every known family. It takes half a minute.

    A cell is wrong if a check fails or raises. A cell is refused if `patch_model` refuses the model with a sentence.

    Args:
        device: the device, such as "cpu" or "cuda:1"; None means CUDA, else MPS, else the CPU.

    Returns:
        The versions and the cells. `print` shows them as tables; `ok` is False if a cell is wrong.

    Raises:
        ValueError: PyTorch has no such device here.
    """
    chosen = _device(device)
    start = time.perf_counter()
    cells: list[Cell] = []
    with _quiet():
        for family in sorted(FAMILIES.values(), key=lambda each: each.name):
            try:
                stock = tiny(family, chosen)
            except Exception as error:  # noqa: BLE001  # the result of the check, which says so
                cells += [broken(family.name, variant, error) for variant in list_variants()]
                continue
            cells += [check_cell(family.name, variant, stock) for variant in list_variants()]
    return Diagnosis(
        packages=installed(), device=_name(chosen), cells=tuple(cells), seconds=time.perf_counter() - start
    )


def _device(name: str | None) -> torch.device:
    """The device of this name, after a first use.

    Raises:
        ValueError: PyTorch has no such device here.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        return torch.zeros((), device=name).device
    except (RuntimeError, AssertionError) as problem:  # torch asserts that it was built with CUDA
        raise ValueError(f"PyTorch cannot use the device {name!r} here: {str(problem).splitlines()[0]}") from None


def _name(device: torch.device) -> str:
    """The device in words."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Inside the `with` block, transformers shows no bars and no messages, and no line says that it is new.

    PyTorch computes on one thread: for such small models, several threads would wait for each other most of the time.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    level, verbosity, bars = LOGGER.level, logs.get_verbosity(), logs.is_progress_bar_enabled()
    LOGGER.setLevel(logging.ERROR)
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        LOGGER.setLevel(level)
        logs.set_verbosity(verbosity)
        if bars:
            logs.enable_progress_bar()
