"""How the site shows a table of figures: runs of one seed are marked, and no figure is broken over two lines."""

from __future__ import annotations

import re

from .captions import captioned

MARK = "†"
LEGEND = f"{MARK} One seed: the interval holds the chance of the held-out rows, and not the chance of the training."
# Spaces inside of these do not end a line: an interval, a figure and its spread, a figure and its unit.
UNBROKEN = re.compile(r"\[[^\]]*\](?!\()|[\d.]+ ± [\d.]+|\d (?:ms|MB|%|×)")


def with_marks(table: str) -> str:
    """A table whose last column counts seeds, with a mark behind each 1 and the legend below."""
    marked, count = re.subn(r"\| 1 \|$", f"| 1 {MARK} |", table, flags=re.MULTILINE)
    return f"{marked}\n\n{LEGEND}" if count else table


def figures(table: str) -> str:
    """A table of figures, below what all rows share. A cell may break between a figure and its interval."""
    return f'<div class="figures" markdown>\n\n{UNBROKEN.sub(_unbroken, captioned(table))}\n\n</div>'


def _unbroken(found: re.Match[str]) -> str:
    return found[0].replace(" ", "\N{NO-BREAK SPACE}")
