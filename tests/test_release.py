"""What a release states in several places is the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

import hf_attn_swap
from hf_attn_swap.publish.citations import ENTRIES

ROOT = Path(__file__).parents[1]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_version() -> None:
    assert CITATION["version"] == hf_attn_swap.__version__
    sections = re.findall(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d|unreleased)$", CHANGELOG, flags=re.MULTILINE)
    assert sections[0][0] == hf_attn_swap.__version__
    assert all(date != "unreleased" for _, date in sections[1:])


def test_every_paper_is_cited() -> None:
    entries = [re.search(r"^  title = {(.+)},$", entry, flags=re.MULTILINE) for entry in ENTRIES.values()]
    titles = {found[1].replace("{", "").replace("}", "") for found in entries if found is not None}
    assert len(titles) == len(ENTRIES)
    assert titles <= {reference["title"] for reference in CITATION["references"]}


def test_the_papers_have_their_addresses() -> None:
    numbers = {number for entry in ENTRIES.values() for number in re.findall(r"eprint = {(.+?)}", entry)}
    addresses = {reference.get("url", "") for reference in CITATION["references"]}
    assert numbers
    assert {f"https://arxiv.org/abs/{number}" for number in numbers} <= addresses
