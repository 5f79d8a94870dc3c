"""A small table as text for terminals and as HTML for notebooks, under one sentence that sums the table up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

Cells = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A sentence, the names of the columns, and one sequence of cells per row."""

    summary: str
    header: Cells
    rows: Sequence[Cells]

    def text(self) -> str:
        """The sentence, then aligned columns two spaces apart."""
        lines = [self.header, *self.rows]
        widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
        aligned = ("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)
        return "\n".join([self.summary, *(line.rstrip() for line in aligned)])

    def html(self) -> str:
        """The sentence as a paragraph, then an HTML table; all text is escaped."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.header)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        return f"<p>{escape(self.summary)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
