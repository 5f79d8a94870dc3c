"""Which cells of the grid are fast, and which are slow."""

from __future__ import annotations

import itertools

import pytest

from .cells import DEEP, DEFAULT_CELLS, FAMILY_NAMES, WIDE, label, over_half

OTHERS = [name for name in FAMILY_NAMES if name not in DEEP]


@pytest.mark.parametrize("pair", list(itertools.combinations(OTHERS, 2)), ids="-".join)
def test_two_families_run_all_variants_fast(pair: tuple[str, str]) -> None:
    """Wherever the families of `DEEP` stand among those of a test, each variant is fast in another family, too."""
    families = tuple(name for name in FAMILY_NAMES if name in (*DEEP, *pair))
    rows = [(row.values, not row.marks) for row in over_half(WIDE, families).args[1]]
    assert {label(cell) for (family, cell), fast in rows if fast and family in pair} == set(map(label, DEFAULT_CELLS))
    assert all(fast for (family, _), fast in rows if family in DEEP)
    assert sum(not fast for _, fast in rows) == len(DEFAULT_CELLS), "each is slow in one family"
