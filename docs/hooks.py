"""What MkDocs calls while it builds the site: generated pages, tables, links to runs, and contents lists.

A page asks for a table by a line of its own, `<!-- table: NAME -->`. The names are those of `OF_THE_SITE` below, and of
`TABLES` in docs/tables.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify
from mkdocs.structure.files import File, Files

from docs.tables import TABLES
from docs.tables.architectures import architectures_table, counts_table, sentences_table
from docs.tables.families import families_table
from docs.tables.gpu import gpu_tables
from docs.tables.matrix import matrix_table
from docs.tables.papers import claims_table
from docs.tables.runs import CARDS, RECORDS, recorded
from docs.tables.seeds import LEGEND, MARK, figures, with_marks
from docs.tables.variants import names_table, variant_page
from hf_attn_swap import list_variants
from hf_attn_swap.publish.card import render
from hf_attn_swap.publish.results import RESULTS_FILE, RunResult

ROOT = Path(__file__).parents[1]
MARKER = re.compile(r"^<!-- table: ([\w-]+) -->$", re.MULTILINE)
CARD_LINK = re.compile(r"\]\(model_cards/([^/)]+)/README\.md\)")
RECORD_LINK = re.compile(r"\]\(model_cards/runs/([^/)]+)/results\.json\)")
# Sections of a card that speak of a model which somebody can load. A record of a run has no such model.
PICTURE = re.compile(r"(!\[[^\]]*\]\()([^)#]+)\.png\)")
# Pages with wide tables: their contents list stands below the title, and the place at the right belongs to the tables.
WIDE = re.compile(r"(?:results|variants)/.*|models/(?:published|matrix)\.md|guides/elsewhere\.md|architectures\.md")
HEADING = re.compile(r"^```.*?^```|^## ([^\n]+)$", re.MULTILINE | re.DOTALL)
OF_A_MODEL = ("Load it", "Intended use", "Citation")


def on_config(config: Any) -> Any:
    """Add the pages of the variants to the navigation."""
    for section in config.nav:
        if "Variants" in section:
            section["Variants"] += [{name: f"variants/{name}.md"} for name in list_variants()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for path, content in generated_pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def generated_pages() -> dict[str, str]:
    """A page for each variant, for each card and for each record of a run, and the changelog: path to Markdown."""
    pages = {"changelog.md": (ROOT / "CHANGELOG.md").read_text("utf-8").replace("](docs/", "](")}
    for name in list_variants():
        pages[f"variants/{name}.md"] = variant_page(name)
    for path in CARDS.glob("*/README.md"):
        pages[f"cards/{path.parent.name}.md"] = _page(path.read_text("utf-8"))
    for path in RECORDS.glob(f"*/{RESULTS_FILE}"):
        pages[f"records/{path.parent.name}.md"] = record_page(path)
    return pages


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put tables instead of their markers, and let links to cards and records lead to their pages."""
    top = posixpath.relpath(".", posixpath.dirname(page.file.src_uri) or ".")
    text = MARKER.sub(lambda found: site_table(found[1]), markdown)
    text = CARD_LINK.sub(rf"]({top}/cards/\1.md)", text)
    text = RECORD_LINK.sub(rf"]({top}/records/\1.md)", text)
    text = PICTURE.sub(lambda found: _for_both_schemes(found, page.file.src_uri), text)
    if not WIDE.fullmatch(page.file.src_uri):
        return text
    page.meta["hide"] = ["toc"]
    return with_contents(text)


def _for_both_schemes(picture: re.Match[str], page: str) -> str:
    """Two pictures, if there is one NAME-dark.png beside it: each where its colours fit. Else a chart, for site.css."""
    start, path = picture[1], picture[2]
    if not (ROOT / "docs" / posixpath.dirname(page) / f"{path}-dark.png").is_file():
        return f"{picture[0]}{{ .chart }}"
    return f"{start}{path}.png#only-light){start}{path}-dark.png#only-dark)"


def with_contents(text: str) -> str:
    """A page with a list of its sections below its title, if it has at least two."""
    titles = [title for title in HEADING.findall(text) if title]
    links = [f"[{title}](#{slugify(title, '-')})" for title in titles]
    title, line, rest = text.partition("\n")
    if len(links) < 2 or not title.startswith("# "):
        return text
    return f"{title}{line}\nOn this page: {' · '.join(links)}\n{{ .contents }}\n{rest}"


def site_table(name: str) -> str:
    """A table of the site. Runs of one seed have a mark.

    Raises:
        ValueError: no table has this name.
    """
    if name in OF_THE_SITE:
        return OF_THE_SITE[name]()
    if name not in TABLES:
        raise ValueError(f"no table is named {name!r}; known are {', '.join({**OF_THE_SITE, **TABLES})}.")
    table = TABLES[name]()
    return figures(with_marks(table) if name in OF_RUNS else table)


def _claims() -> str:
    return f"{claims_table({run.name: run for run in recorded()}, mark=MARK)}\n\n{LEGEND}"


OF_RUNS = ("published", "conversion", "scratch", "glue")  # their last column counts seeds
OF_THE_SITE = {
    "architectures": architectures_table,
    "architectures-counts": counts_table,
    "architectures-sentences": sentences_table,
    "families": families_table,
    "gpu": gpu_tables,
    "matrix": lambda: figures(matrix_table()),
    "papers": _claims,
    "variants": names_table,
}


def record_page(path: Path) -> str:
    """The page of a run without a card: what a card would say, without what concerns a model that one can load."""
    text = render(RunResult.load(path))
    for title in OF_A_MODEL:
        text = re.sub(rf"^## {title}\n.*?(?=^## |\Z)", "", text, flags=re.MULTILINE | re.DOTALL)
    return _page(text) + f"\n## The whole record\n\n`{path.relative_to(ROOT).as_posix()}` in the repository.\n"


def _page(card: str) -> str:
    """A card without the metadata for the Hub. The search leaves cards out: they would fill every answer."""
    body = card.split("---\n", 2)[2]
    return f"---\nsearch:\n  exclude: true\n---\n{body}"
