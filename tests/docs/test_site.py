"""The generated pages of the site: each variant has its options, its section and its paper; each marker has a table."""

from __future__ import annotations

import dataclasses
import re

import pytest

from docs.tables.matrix import TASKS, matrix_table
from docs.tables.runs import CARDS, RECORDS, cards, has_card, published_table, recorded
from docs.tables.variants import layer_picture, names_table, slug, variant_page
from hf_attn_swap import list_variants
from hf_attn_swap.layer.registry import get_variant
from hf_attn_swap.publish.results import RESULTS_FILE, SCRATCH

from .pages import PAGES

ANCHORS = {slug(heading) for heading in re.findall(r"^#+ (.+)$", PAGES["mathematics.md"], re.M)}


@pytest.mark.parametrize("name", list_variants())
def test_a_variant_has_its_page(name: str) -> None:
    page, cls = variant_page(name), get_variant(name)
    assert cls.about.formula in page
    for field in dataclasses.fields(cls.Options):
        meaning = re.search(rf"^\| `{field.name}` \| `(.*)` \| (.+) \|$", page, re.M)
        assert meaning is not None, f"the docstring of {cls.Options.__name__} says nothing of {field.name}"
        assert meaning[1] == repr(field.default)
    linked = set(re.findall(r"mathematics\.md#([\w-]+)", page))
    assert linked <= ANCHORS
    assert name == "softmax" or len(linked) == 2


def test_the_picture_shows_the_places() -> None:
    assert layer_picture(get_variant("modern_hopfield")).count('class="changed"') == 2
    assert 'class="gone">W' in layer_picture(get_variant("simpletron"))
    assert 'class="gone">softmax' in layer_picture(get_variant("simpletron"))
    assert 'class="changed">product with V' in layer_picture(get_variant("simpletron"))
    assert 'class="gone">W' not in layer_picture(get_variant("simpletron_resl"))
    assert "No step changes" in layer_picture(get_variant("softmax"))


def test_a_wide_page_lists_its_sections_below_its_title() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra docs)")
    from docs.hooks import on_page_markdown

    page = _Page()
    made = on_page_markdown("# Title\n\nText.\n\n## One `a`\n\n```text\n## no heading\n```\n\n## Two, b\n", page)
    assert made.startswith("# Title\n\nOn this page: [One `a`](#one-a) · [Two, b](#two-b)\n{ .contents }\n\nText.")
    assert page.meta == {"hide": ["toc"]}


def test_every_variant_is_in_the_table_and_leads_to_its_page() -> None:
    table = names_table()
    for name in list_variants():
        aliases = ", ".join(f"`{alias}`" for alias in get_variant(name).aliases)
        assert f"| [`{name}`]({name}.md) | {aliases or '–'} | " in table
        assert aliases in variant_page(name)


def test_every_measured_task_is_in_the_matrix() -> None:
    rows = {line.split("`")[1]: line for line in matrix_table().splitlines()[2:]}
    assert set(rows) == set(list_variants())
    for run in recorded():
        for swap in run.swaps:
            for component in swap.components:
                assert f"[{TASKS[run.task]}](" in rows[component.name]


def test_every_marker_has_a_table_and_links_to_runs_lead_to_their_pages() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra docs)")
    from docs.hooks import MARKER, on_page_markdown

    markers = {name for text in PAGES.values() for name in MARKER.findall(text)}
    assert "<!-- table" not in "".join(MARKER.sub("", text) for text in PAGES.values())
    for name in markers:
        made = on_page_markdown(f"<!-- table: {name} -->", _Page())
        assert re.search(r"^\| .+ \|$", made, re.M)
        assert "model_cards/" not in made
    with pytest.raises(ValueError, match="no table is named 'sped'"):
        on_page_markdown("<!-- table: sped -->", _Page())


@pytest.mark.slow
def test_every_link_to_a_run_has_its_page() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra docs)")
    from docs.hooks import generated_pages, on_page_markdown

    pages = set(generated_pages())
    markers = "".join(f"<!-- table: {name} -->\n" for name in ("published", "conversion", "scratch"))
    linked = set(re.findall(r"\]\(\.\./((?:cards|records)/[^)]+)\)", on_page_markdown(markers, _Page())))
    assert {f"cards/{run.name}.md" for run in cards()} <= linked <= pages
    assert any(page.startswith("records/") for page in linked)


def test_the_page_of_a_record_offers_no_model() -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed (extra docs)")
    from docs.hooks import record_page

    run = next(run for run in recorded() if not has_card(run))
    page = record_page(RECORDS / run.name / RESULTS_FILE)
    assert "from_pretrained" not in page
    assert f"{RECORDS.name}/{run.name}/{RESULTS_FILE}" in page
    for title in ("Attention", "Data", "Results", "Limits", "Made with"):
        assert f"\n## {title}\n" in page


def test_published_models_have_a_card_and_other_runs_have_none() -> None:
    """One card per base model, attention and task."""
    made = [(run.base.name, run.variant, run.data.name, run.data.config, run.task) for run in cards()]
    assert made
    assert len(set(made)) == len(made)
    assert {path.parent.name for path in CARDS.glob("*/README.md")} == {run.name for run in cards()}
    assert not list(RECORDS.glob("*/README.md"))
    assert all(run.base.relation != SCRATCH for run in cards())


def test_the_table_of_published_models_has_every_card() -> None:
    rows = published_table().splitlines()[2:]
    assert len(rows) == len(cards())
    for run, row in zip(cards(), rows, strict=True):
        assert f"](model_cards/{run.name}/README.md)" in row
        assert f"huggingface.co/{run.base.name})" in row


class _Page:
    """As much of a page as the hook reads."""

    class file:  # noqa: N801
        src_uri = "results/conversion.md"

    def __init__(self) -> None:
        self.meta: dict[str, object] = {}
