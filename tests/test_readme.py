"""README: its figures are those of the records, and its links lead to files that are here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from docs.pictures.swap import FILE, variants_at, whole
from docs.tables.first_screen import first_screen
from docs.tables.runs import recorded
from hf_attn_swap import list_variants
from hf_attn_swap.variants.base import PLACES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DECODED = ROOT / "benchmarks" / "figures" / "bench-decode-heads.json"
REPOSITORY = "https://github.com/hf-attn-swap/hf-attn-swap"
SITE = "https://hf-attn-swap.github.io/hf-attn-swap/"


def test_links_lead_to_files() -> None:
    """All links are absolute, so that the package index shows the whole page."""
    links = re.findall(r"\]\(([^)]+)\)", README)
    own = [link for link in links if link.startswith(REPOSITORY)]
    assert own
    for link in own:
        _, _, path = link.removeprefix(REPOSITORY).lstrip("/").split("/", 2)
        assert (ROOT / path).exists(), link
    assert all(link.startswith("https://") for link in links)
    pages = [link.removeprefix(SITE) for link in links if link.startswith(SITE)]
    assert pages
    for file in ("pyproject.toml", "mkdocs.yml"):
        assert SITE in (ROOT / file).read_text(encoding="utf-8")
    for page in pages:
        path, _, title = page.partition("#")
        file = page_of(path)
        assert file.exists(), page
        assert not title or title in titles(file), page
    assert f"/main/docs/pictures/{FILE}" in README
    assert (ROOT / "docs" / "pictures" / FILE).stat().st_size > 10_000


def page_of(path: str) -> Path:
    """The file of a page of the site."""
    page = ROOT / "docs" / path
    return page / "index.md" if page.is_dir() else page.with_suffix(".md")


def titles(page: Path) -> set[str]:
    """The anchors of a page's titles."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") for title in headings}


def test_the_picture_names_every_variant() -> None:
    shown = {name for place in PLACES for name in variants_at(place)}
    assert shown | set(whole()) == set(list_variants()) - {"softmax"}


def test_every_run_records_its_study_and_steps() -> None:
    """The tables sort by the one and print the other; neither is guessed from a name or a sentence."""
    assert all(run.study is not None and run.steps is not None for run in recorded())


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_screen(page: str) -> None:
    """The losses, the answers and the minutes of its table are those of the record."""
    models, lines = first_screen(), (ROOT / page).read_text(encoding="utf-8").splitlines()
    stock, rows = models["stock"], [line.split(" | ") for line in lines if line.startswith("| **")][:3]
    for name, *_, lost, answers, minutes in rows:
        figures = models[name.strip("|* ")]
        for text, perplexity in figures["perplexity"].items():
            assert f"{perplexity / stock['perplexity'][text]:.3f} ×" in lost, (name, text)
        for distance, recalled in figures["recall"].items() if "recall" in lost else ():
            assert f"{recalled / stock['recall'][distance]:.2f} ×" in lost, (name, distance)
        assert answers == f"{numbers_found(stock):.0f} → {numbers_found(figures):.0f} %", name
        assert minutes == f"{figures['processor_minutes']:.0f} |", name
    assert len(rows) == 3
    decoded = {row["context"]: row for row in json.loads(DECODED.read_text("utf-8"))["rows"] if row["model"] != "stock"}
    assert f"{decoded[16384]['decode']:.2f} × the time of a token" in rows[1][2]
    assert f"after 256 {decoded[256]['decode']:.2f} ×" in rows[1][2]


def numbers_found(figures: dict[str, Any]) -> float:
    """The share of hidden numbers that a model finds, in per cent."""
    scores = {task: values for task, _, values in figures["scores"]}
    return 100 * fmean(scores["niah_multikey"])
