"""The site in a real browser, 1,280 px wide: no table is cut off at the right."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .pages import ROOT

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
WIDTH = 1280
# A table lies in a box that scrolls; with a script of the theme, or, before it ran, the table is its own box.
TABLES = """Array.from(document.querySelectorAll("article table:not(.highlighttable)"), table => {
    const box = table.closest(".md-typeset__scrollwrap") || table;
    return [box.scrollWidth, box.clientWidth];
})"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine (Debian: apt install chromium)"),
    *(
        pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} is not installed (extra {extra})")
        for name, extra in (("playwright", "test"), ("mkdocs", "docs"))
    ),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    return folder


def test_no_table_is_cut(site: Path) -> None:
    count, cut = cut_tables(site)
    assert count > 200
    assert not cut


def cut_tables(site: Path) -> tuple[int, list[tuple[str, int, int, int]]]:
    """How many tables the site has, and those wider than their box: page, which one, its width, that of the box."""
    from playwright.sync_api import sync_playwright

    count, cut = 0, []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 900})
        for path in sorted(site.rglob("index.html")):
            if "<table" not in path.read_text("utf-8"):
                continue
            page.goto(path.as_uri())
            for place, (wide, box) in enumerate(page.evaluate(TABLES), 1):
                count += 1
                if wide > box:
                    cut.append((str(path.parent.relative_to(site)), place, wide, box))
        browser.close()
    return count, cut
