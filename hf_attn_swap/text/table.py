"""Writes small tables: as text for terminals, as HTML for notebooks, and as Markdown for pages and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Cells = Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with one sentence above.

    Attributes:
        summary: the sentence above the table.
        header: the names of the columns.
        rows: one sequence of cells per row.
    """

    summary: str
    header: Cells
    rows: Sequence[Cells]

    def text(self) -> str:
        """The sentence, followed by the rows. Columns are aligned and two spaces apart."""
        rows = [self.header, *self.rows]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = [self.summary]
        for row in rows:
            padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(padded).rstrip())
        return "\n".join(lines)

    def html(self) -> str:
        """The sentence as a paragraph, followed by an HTML table. All text is escaped."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.header)
        body = ""
        for row in self.rows:
            cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
            body += f"<tr>{cells}</tr>"
        return f"<p>{escape(self.summary)}</p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


class Tabled:
    """What has a table: it is printed as text, and shown as HTML in a notebook."""

    def table(self) -> Table:
        """The table."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()


def markdown(header: Cells, rows: Iterable[Cells]) -> str:
    """A Markdown table, without a line break at its end. A `|` inside a cell is escaped.

    Raises:
        ValueError: a row has more or fewer cells than the header.
    """
    lines = [markdown_row(header), markdown_row(["---"] * len(header))]
    for row in rows:
        if len(row) != len(header):
            raise ValueError(f"this row has {len(row)} cells and the header has {len(header)}: {list(row)}.")
        lines.append(markdown_row(row))
    return "\n".join(lines)


def markdown_row(cells: Cells) -> str:
    """One line of a Markdown table."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"
