"""A table that a recipe prints."""

from __future__ import annotations


def rows(shown: str) -> dict[str, list[str]]:
    """The cells of the printed table, by the first cell."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.splitlines()[2:]]
    return {first: rest for first, *rest in cells}
