"""At 80 characters no table loses a column, a cell or a word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hf_attn_swap import list_variants
from hf_attn_swap.describe import HEADER, describe
from hf_attn_swap.layer.registry import get_variant
from hf_attn_swap.publish.checkpoint import skeleton

from .conftest import Outcome

Command = Callable[..., Outcome]
WIDTH = 80


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


def columns(lines: Sequence[str], header: Sequence[str]) -> list[str]:
    """The text of each column without its blanks; a column starts where its name starts."""
    starts = []
    for name in header:
        starts.append(lines[0].index(name, starts[-1] + 1 if starts else 0))
    ends = [*starts[1:], None]
    return [
        "".join("".join(line[start:end].split()) for line in lines[1:]) for start, end in zip(starts, ends, strict=True)
    ]


def whole(lines: Sequence[str], header: Sequence[str], rows: Sequence[Sequence[str]]) -> bool:
    """True if the lines hold every cell, in its column and in full."""
    wanted = ["".join("".join(cell.split()) for cell in column) for column in zip(*rows, strict=True)]
    return all(len(line) <= WIDTH for line in lines) and columns(lines, header) == wanted


def test_describe(command: Command, tiny_bert: Path, tmp_path: Path) -> None:
    assert command("patch", tiny_bert, "modern_hopfield+gated", tmp_path / "out", "--layers", "1").code == 0
    lines = command("describe", tmp_path / "out").out.splitlines()[1:]
    rows = [row.cells() for row in describe(skeleton(str(tmp_path / "out"))).rows]
    assert any(len(cell) > WIDTH for cells in rows for cell in cells)
    assert whole(lines, HEADER, rows)


def test_variants(command: Command) -> None:
    lines = [line for line in command("variants").out.splitlines() if line.startswith("│")]
    shown = ["".join("".join(line.split("│")[place].split()) for line in lines) for place in range(1, 7)]
    variants = [get_variant(name) for name in list_variants()]
    options = [
        ",".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(variant.Options)) or "-"
        for variant in variants
    ]
    wanted = [
        list_variants(),
        [", ".join(variant.aliases) or "-" for variant in variants],
        options,
        [variant.about.summary for variant in variants],
        [variant.about.parameters_added for variant in variants],
        [variant.about.paper for variant in variants],
    ]
    assert all(len(line) <= WIDTH for line in lines)
    assert shown == ["".join("".join(cell.split()) for cell in column) for column in wanted]
