"""What is equal in every row of a table is said once, above it."""

from __future__ import annotations

import re

from hf_attn_swap.text.table import markdown

CELLS = re.compile(r"(?<!\\)\|")  # between two cells: no `|` of a cell, which is escaped


def captioned(text: str) -> str:
    """A table without its columns of one value, below a sentence that says these values.

    Args:
        text: a Markdown table; what stands behind an empty line below it stays as it is.

    The first column stays, and a difference, since a reader looks for it. A table of one row stays as it is.
    """
    table, *rest = text.split("\n\n", 1)
    header, _, *rows = [_cells(line) for line in table.splitlines()]
    equal = [place for place in range(1, len(header)) if _is_equal(header[place], [row[place] for row in rows])]
    if not equal:
        return text
    caption = f"In every row: {', '.join(f'{header[place]} {rows[0][place]}' for place in equal)}."
    kept = [place for place in range(len(header)) if place not in equal]
    made = markdown([header[place] for place in kept], [[row[place] for place in kept] for row in rows])
    return "\n\n".join([caption, made, *rest])


def _is_equal(title: str, column: list[str]) -> bool:
    return len(column) > 1 and len(set(column)) == 1 and column[0] != "" and not title.startswith("difference")


def _cells(line: str) -> list[str]:
    """The cells of a line, as they were before `markdown` escaped them."""
    return [cell.strip().replace("\\|", "|") for cell in CELLS.split(line)[1:-1]]
