"""Troubleshooting: each error on the page is a sentence of the package."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import hf_attn_swap

from .pages import PAGES

HOLE = "…"
QUOTED = re.findall(r"^```text\n(.*?)\n```", PAGES["guides/troubleshooting.md"], re.DOTALL | re.MULTILINE)


def words(node: ast.expr) -> str:
    """The text of an expression, with a hole for all that is known at run time only."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(words(part) for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return words(left) + words(right)
    return HOLE


@functools.cache
def sentences() -> set[str]:
    """What the package can say: all of its texts, once."""
    trees = (ast.parse(path.read_text("utf-8")) for path in Path(hf_attn_swap.__file__).parent.rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {words(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)} - {HOLE}


def is_said(quoted: str) -> bool:
    """A sentence of the package has these words in this order; a hole may hold more, but no words of its own."""
    return any(re.sub(f"{HOLE}+", HOLE, quoted) in re.sub(f"{HOLE}+", HOLE, text) for text in sentences())


def test_an_error_on_the_page_is_said_by_the_package() -> None:
    assert not [quoted for quoted in QUOTED if not is_said(quoted)]


def test_an_error_has_a_cause_and_a_cure() -> None:
    cures = re.findall(r"^```\n\n\*\*Cause:\*\* .+\. \*\*Cure:\*\* .+\.$", PAGES["guides/troubleshooting.md"], re.M)
    assert len(cures) == len(QUOTED)
