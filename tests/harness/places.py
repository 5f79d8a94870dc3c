"""Which variants a fast test runs where the place in the layer matters, and not the formula.

Saving, copying, hooks, adapters and modes see a variant by the places that it changes. `in_turn` runs every family with
one of the places at least, and every place with one of the families. Both lists come from the registries: no variant
and no family is written here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import pytest

from hf_attn_swap import list_variants
from hf_attn_swap.variants.base import VARIANTS
from tests.contract.cells import FAMILY_NAMES

# One for each set of places; the control, which changes no place, is one of them.
SMOKES = list({VARIANTS[name].places: name for name in list_variants()}.values())
Row, Column = TypeVar("Row"), TypeVar("Column")


def one_per_place() -> tuple[str, ...]:
    """The last variant of each set of places. The control changes none, and computes what the stock model computes."""
    return tuple({VARIANTS[name].places: name for name in list_variants() if VARIANTS[name].places}.values())


def turns(rows: Sequence[Row], columns: Sequence[Column], times: int = 1) -> list[tuple[Row, Column]]:
    """Pairs of a row and a column: every row is in at least `times` of them, and so is every column."""
    steps = range(max(len(rows), len(columns)))
    shifts = range(min(times, len(rows), len(columns)))
    taken = {(step % len(rows), (step + shift) % len(columns)) for step in steps for shift in shifts}
    return [(rows[row], columns[column]) for row, column in sorted(taken)]


def in_turn(families: Sequence[str] = FAMILY_NAMES, columns: Sequence[str] | None = None, times: int = 1) -> Any:
    """Parametrise a test by `name` and `variant`: the families and the places, or `columns`, take turns."""
    return pytest.mark.parametrize(("name", "variant"), turns(families, columns or one_per_place(), times))
