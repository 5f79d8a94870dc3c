"""At 80 characters no table loses a column, a cell or a word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hf_attn_swap import list_variants
from hf_attn_swap.describe import HEADER, describe
from hf_attn_swap.layer.registry import get_variant
from hf_attn_swap.publish.card import COLUMNS
from hf_attn_swap.publish.checkpoint import skeleton
from hf_attn_swap.text.table import Table
from hf_attn_swap_cli.app import show
from tests.publish.examples import result

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


def test_markup_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("[red]0[/red] " * 9, "[/x]", "word " * 9)]
    header = ("layer", "module", "")
    show(Table(summary="both", header=header[:2], rows=[row[:2] for row in rows]))
    assert whole(capsys.readouterr().out.splitlines()[1:], header[:2], [row[:2] for row in rows])


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


def test_the_markdown_table_keeps_its_lines(command: Command, tmp_path: Path) -> None:
    """It is for a file, and a line that is broken is no row any more."""
    run = result()
    (tmp_path / "run").mkdir()
    run.save(tmp_path / "run/results.json")
    lines = command("table", tmp_path).out.splitlines()
    assert lines[0] == f"| {' | '.join(COLUMNS)} |"
    assert {line.count(" | ") for line in lines} == {len(COLUMNS) - 1}
