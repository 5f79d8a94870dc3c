"""What MkDocs calls while it builds the site: generated pages, tables in the place of their markers, links to cards.

A page asks for a table by a line of its own, `<!-- table: NAME -->`. The names are those of `OF_THE_SITE` below, and of
`TABLES` in docs/tables.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs.tables import CARDS, TABLES, published
from docs.tables.families import families_table
from docs.tables.papers import claims_table
from docs.tables.seeds import LEGEND, MARK, figures, with_marks
from docs.tables.variants import names_table, variant_page
from hf_attn_swap import list_variants

ROOT = Path(__file__).parents[1]
MARKER = re.compile(r"^<!-- table: ([\w-]+) -->$", re.MULTILINE)
CARD_LINK = re.compile(r"\]\(model_cards/([^/)]+)/README\.md\)")


def on_config(config: Any) -> Any:
    """Add the pages of the variants to the navigation."""
    for section in config.nav:
        if "Variants" in section:
            section["Variants"] += [{name: f"variants/{name}.md"} for name in list_variants()]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each variant and for each card, and the changelog."""
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "changelog.md", content=changelog))
    for name in list_variants():
        files.append(File.generated(config, f"variants/{name}.md", content=variant_page(name)))
    for path in sorted(CARDS.glob("*/README.md")):
        files.append(File.generated(config, f"cards/{path.parent.name}.md", content=_card_page(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put tables in the place of their markers, and let links to cards lead to the pages of the cards."""
    folder = posixpath.dirname(page.file.src_uri)
    cards = posixpath.relpath("cards", folder or ".")
    return CARD_LINK.sub(rf"]({cards}/\1.md)", MARKER.sub(lambda found: site_table(found[1]), markdown))


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
    return figures(with_marks(table) if name in ("conversion", "scratch") else table)


def _claims() -> str:
    return f"{claims_table({run.name: run for run in published()}, mark=MARK)}\n\n{LEGEND}"


OF_THE_SITE = {"families": families_table, "papers": _claims, "variants": names_table}


def _card_page(path: Path) -> str:
    """A card without the metadata for the Hub. The search leaves cards out: they would fill every answer."""
    body = path.read_text("utf-8").split("---\n", 2)[2]
    return f"---\nsearch:\n  exclude: true\n---\n{body}"
