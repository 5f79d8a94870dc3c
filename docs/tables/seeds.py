"""How the site shows a table of figures: runs of one seed are marked, and a cell stays on one line."""

from __future__ import annotations

import re

MARK = "†"
LEGEND = f"{MARK} One seed: the interval holds the chance of the held-out rows, and not the chance of the training."


def with_marks(table: str) -> str:
    """A table whose last column counts seeds, with a mark behind each 1 and the legend below."""
    marked, count = re.subn(r"\| 1 \|$", f"| 1 {MARK} |", table, flags=re.MULTILINE)
    return f"{marked}\n\n{LEGEND}" if count else table


def figures(table: str) -> str:
    """A table whose cells are figures. The style sheet keeps each cell on one line, and the table scrolls."""
    return f'<div class="figures" markdown>\n\n{table}\n\n</div>'
