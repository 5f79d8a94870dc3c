"""The report opens in a real browser: everything is drawn, nothing is asked of the network, a phone can read it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), ""
)
PICTURES = "Array.from(document.images, image => [image.complete, image.naturalWidth, image.width])"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not BROWSER, reason="no Chromium on this machine (Debian: apt install chromium)"),
    pytest.mark.skipif(
        importlib.util.find_spec("playwright") is None, reason="playwright is not installed (extra test)"
    ),
]


@pytest.mark.parametrize("width", [1200, 380])
def test_it_renders(
    command: Callable[..., Any], tiny_bert: Path, labelled_texts: Path, tmp_path: Path, width: int
) -> None:
    from playwright.sync_api import sync_playwright

    data = ("--data", labelled_texts, "--column", "sentence", "--out", tmp_path)
    assert command("report", tiny_bert, "--variant", "modern_hopfield", *data).code == 0
    said: list[str] = []
    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "report.html").as_uri())
        pictures = page.evaluate(PICTURES)
        scrolled = page.evaluate("document.documentElement.scrollWidth")
        title = page.title()
        browser.close()
    assert not said
    assert asked == [(tmp_path / "report.html").as_uri()]
    assert title == "modern_hopfield in BertForSequenceClassification"
    assert len(pictures) == 5
    assert all(done and natural > 100 and 100 < shown <= width for done, natural, shown in pictures)
    assert scrolled <= width, "the page must not scroll sideways"
