"""The tables that reports print and that pages show."""

from __future__ import annotations

import pytest

from hf_attn_swap.text.table import Table, markdown

TABLE = Table(summary="2 < 3", header=("layer", "module"), rows=[("0", "a"), ("10", "long & <b>")])


def test_text_has_aligned_columns_and_no_blanks_at_the_end() -> None:
    assert TABLE.text() == "2 < 3\nlayer  module\n0      a\n10     long & <b>"


def test_html_is_escaped() -> None:
    assert TABLE.html() == (
        "<p>2 &lt; 3</p><table><thead><tr><th>layer</th><th>module</th></tr></thead><tbody>"
        "<tr><td>0</td><td>a</td></tr><tr><td>10</td><td>long &amp; &lt;b&gt;</td></tr></tbody></table>"
    )


def test_a_table_without_rows_is_its_header() -> None:
    assert Table(summary="none", header=("layer",), rows=[]).text() == "none\nlayer"


def test_markdown_escapes_the_line_between_cells() -> None:
    assert markdown(("a", "b"), [("1", "x | y"), ("2", "")]) == "| a | b |\n| --- | --- |\n| 1 | x \\| y |\n| 2 |  |"
    assert markdown(("a",), []) == "| a |\n| --- |"


def test_markdown_refuses_a_row_of_another_length() -> None:
    with pytest.raises(ValueError, match=r"\['1'\]"):
        markdown(("a", "b"), [("1",)])
