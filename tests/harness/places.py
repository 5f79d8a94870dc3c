"""Which variants a fast test runs where the place in the layer matters, and not the formula.

Saving, copying, hooks, adapters and modes see a variant by the places that it changes. `each_place` runs every family
with one variant of each place; `in_turn` runs every row with two of the columns, and every column with two of the rows.
All other cells are marked slow. Both lists come from the registries: no variant and no family is written here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import pytest

from hf_attn_swap import list_variants
from hf_attn_swap.variants.base import VARIANTS
from tests.contract.cells import FAMILY_NAMES, PAIRS

# One for each set of places; the control, which changes no place, is one of them.
SMOKES = list({VARIANTS[name].places: name for name in list_variants()}.values())
Row, Column = TypeVar("Row"), TypeVar("Column")


def one_per_place() -> tuple[str, ...]:
    """The last variant of each set of places. The control changes none, and computes what the stock model computes."""
    return tuple({VARIANTS[name].places: name for name in list_variants() if VARIANTS[name].places}.values())


def turns(rows: Sequence[Row], columns: Sequence[Column], times: int = 2) -> list[tuple[Row, Column]]:
    """Pairs of a row and a column: every row is in at least `times` of them, and so is every column."""
    steps = range(max(len(rows), len(columns)))
    shifts = range(min(times, len(rows), len(columns)))
    taken = {(step % len(rows), (step + shift) % len(columns)) for step in steps for shift in shifts}
    return [(rows[row], columns[column]) for row, column in sorted(taken)]


def variants(*, compositions: bool = False) -> list[Any]:
    """All variants for `parametrize`; those beyond one of each place are slow, and so are the compositions of two."""
    names = (*list_variants(), *(PAIRS if compositions else ()))
    return [_param(name in one_per_place(), name) for name in names]


def each_place(families: Sequence[str] = FAMILY_NAMES, *, compositions: bool = False) -> Any:
    """Parametrise a test by `name` and `variant`: each family with one variant of each place; the rest is slow."""
    return _cells(families, [(name, variant) for name in families for variant in one_per_place()], compositions)


def in_turn(
    families: Sequence[str] = FAMILY_NAMES, columns: Sequence[str] | None = None, *, compositions: bool = False
) -> Any:
    """Parametrise a test by `name` and `variant`: the families and the places, or `columns`, take turns."""
    return _cells(families, turns(families, columns or one_per_place()), compositions)


def every(rows: Sequence[Any], columns: Sequence[Any], fast: Iterable[tuple[Any, Any]]) -> list[Any]:
    """Every row with every column for `parametrize`; a row of several values is spread, and all but `fast` is slow."""
    chosen = list(fast)
    pairs = [(row, column) for row in rows for column in columns]
    return [
        _param((row, column) in chosen, *(row if isinstance(row, tuple) else (row,)), column) for row, column in pairs
    ]


def _cells(families: Sequence[str], fast: list[tuple[str, str]], compositions: bool) -> Any:
    names = (*list_variants(), *(PAIRS if compositions else ()))
    return pytest.mark.parametrize(("name", "variant"), every(families, names, fast))


def _param(fast: bool, *values: Any) -> Any:
    return pytest.param(*values, marks=() if fast else pytest.mark.slow)
