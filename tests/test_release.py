"""What a release states in several places is the same everywhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

import hf_attn_swap
from hf_attn_swap import tested
from hf_attn_swap.publish.card import PAPERS

ROOT = Path(__file__).parents[1]
CITATION: dict[str, Any] = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_version() -> None:
    assert CITATION["version"] == hf_attn_swap.__version__
    sections = re.findall(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d|unreleased)$", CHANGELOG, flags=re.MULTILINE)
    assert sections[0][0] == hf_attn_swap.__version__
    assert all(date != "unreleased" for _, date in sections[1:])


def test_every_paper_is_cited() -> None:
    titles = re.findall(r"^  title = {(.+)},$", PAPERS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert titles
    assert {re.sub(r"[{}\\]", "", title) for title in titles} <= {work["title"] for work in CITATION["references"]}


def test_the_papers_have_their_addresses() -> None:
    numbers = set(re.findall(r"eprint = {(.+?)}", PAPERS.read_text(encoding="utf-8")))
    addresses = {reference.get("url", "") for reference in CITATION["references"]}
    assert numbers
    assert {f"https://arxiv.org/abs/{number}" for number in numbers} <= addresses


def test_the_oldest_transformers_that_is_tested() -> None:
    """pyproject.toml lets no older version in, and `make test-oldest` installs this one."""
    floor = re.search(r'"transformers>=(\S+?),!=(\S+?),<6"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert floor is not None
    oldest = tested.OLDEST_TRANSFORMERS
    assert floor[1] == oldest.rpartition(".")[0]
    assert floor[2] == f"{floor[1]}.0"  # the only version of this MINOR below the oldest
    assert oldest == f"{floor[1]}.1"
    assert re.findall(r"^OLDEST := transformers==(\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.M) == [oldest]


def test_the_versions_that_are_tested_are_the_pins() -> None:
    """constraints.txt and the extra `tools` have what the tests install; lines for older Pythons do not count."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    lines += re.findall(r'^    "(\S+==\S+)",$', (ROOT / "pyproject.toml").read_text("utf-8"), re.M)
    lines += re.findall(r"^TORCH := (\S+)$", (ROOT / "Makefile").read_text("utf-8"), re.M)  # installed first
    pins = [re.match(r"(\S+)==(\S+)(?: ; python_version >= .*)?$", line) for line in lines]
    pinned = {pin[1]: pin[2] for pin in pins if pin is not None}
    assert {name: pinned.get(name) for name in tested.TESTED} == tested.TESTED
    assert tested.TESTED["transformers"] == tested.NEWEST_TRANSFORMERS


def test_the_pythons_that_are_tested() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text("utf-8")
    pythons = {tuple(re.findall(r'"([\d.]+)"', line)) for line in re.findall(r"python: \[(.*)\]$", workflow, re.M)}
    assert tested.TESTED_PYTHONS in pythons
