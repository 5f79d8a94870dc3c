"""At 80 characters no table loses a column, a cell or a word."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from hf_attn_swap import list_variants
from hf_attn_swap.layer.registry import get_variant

from .conftest import Outcome

Command = Callable[..., Outcome]
WIDTH = 80


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))


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
