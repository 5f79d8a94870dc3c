"""The page of each registered variant: what it changes, its options, its cost, its results and its source."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from hf_attn_swap.layer.registry import get_variant, list_variants
from hf_attn_swap.publish.card import bibtex
from hf_attn_swap.text.table import markdown
from hf_attn_swap.variants.base import Variant

from .runs import conversion_table, recorded, scratch_table
from .seeds import figures, with_marks
from .speed import long_texts_of, speed_of

MATHEMATICS = Path(__file__).parents[1] / "mathematics.md"
ELSEWHERE = {  # where the figures of a variant are that no recorded run of a recipe holds
    "sink": "[A sink and smoothed channels](../results/outliers.md#a-sink-and-smoothed-channels) has the figures.",
    "window": "[Long texts](../results/long-texts.md) has what was lost, and "
    "[Speed and memory](../results/speed.md#windows) the time and the cache.",
}
STEPS = {
    "keys": "keys K, V",
    "scores": "scores S",
    "mask": "mask M",
    "normalizer": "softmax",
    "weights": "weights P",
    "values": "product with V",
    "read": "heads Y",
    "projection": "W<sub>o</sub>",
    "write": "output",
}


def variant_page(name: str) -> str:
    """The Markdown of one page."""
    cls = get_variant(name)
    parts = [
        f"# `{name}`",
        f"{cls.about.summary[0].upper()}{cls.about.summary[1:]}.{_also_called(cls)}",
        layer_picture(cls),
        "## Formula",
        f"```text\n{cls.about.formula}\n```",
        _where_the_formula_is(cls),
        "## Options",
        _options(cls),
        "## How it is computed",
        f"- Fused form: {cls.about.fused}.",
        f"- New parameters per layer: {cls.about.parameters_added}.",
        f"- Composes with other variants: {_composes(cls)}",
        "## Cost",
        _cost(name),
        "## Results",
        _results(name),
        "## Paper",
        f"{cls.about.paper}.",
        *(f"```bibtex\n{entry}\n```" for entry in bibtex(cls.about.paper)),
        "## Code",
        f"::: {cls.__module__}.{cls.__name__}\n    options:\n      show_source: true\n      heading_level: 3\n"
        "      members: false",
    ]
    return "\n\n".join(parts) + "\n"


def names_table() -> str:
    """One row per variant, in few words; the names lead to the pages."""
    rows = []
    for name in list_variants():
        cls = get_variant(name)
        also = _aliases(cls) or "–"
        rows.append((f"[`{name}`]({name}.md)", also, cls.about.summary, f"`{cls.about.formula}`", cls.about.paper))
    return markdown(("name", "also accepted", "what changes", "formula", "paper"), rows)


def _aliases(cls: type[Variant]) -> str:
    """The other names of a variant, for a page."""
    return ", ".join(f"`{alias}`" for alias in cls.aliases)


def _also_called(cls: type[Variant]) -> str:
    """A sentence on the other names of a variant; empty if the variant has none."""
    return f" `patch_model` also accepts {_aliases(cls)}." if cls.aliases else ""


def layer_picture(cls: type[Variant]) -> str:
    """The steps of a layer in their order; those that the variant changes stand out.

    A variant that replaces the scores and the weights changes the product with V, and leaves out what comes before.
    """
    boxes = []
    for step, title in STEPS.items():
        kind = _kind(cls, step)
        boxes.append(f'<li><span class="{kind}">{title}</span></li>' if kind else f"<li><span>{title}</span></li>")
    caption = "One attention layer. The filled steps change"
    if cls.replaces:
        caption += ", and the crossed-out steps are left out"
    if not cls.places:
        caption = "One attention layer. No step changes"
    return f'<ol class="layer" aria-label="{caption}">\n' + "\n".join(boxes) + f"\n</ol>\n\n{caption}."


def _kind(cls: type[Variant], step: str) -> str:
    """What happens to one step: "changed", "gone", or nothing."""
    if step == "projection":
        return "" if cls.keeps_projection else "gone"
    if cls.replaces and step in ("keys", "scores", "mask", "normalizer", "weights"):
        return "gone"
    return "changed" if step in cls.places or (cls.replaces and step == "values") else ""


def _where_the_formula_is(cls: type[Variant]) -> str:
    """What the letters mean, and where the whole formula stands."""
    words = "S are the scaled scores, P the weights, Y the heads, V a token's own values, x what the projections of "
    words += "the layer read, and s is the strength ([notation](../mathematics.md#notation))."
    section = _section(cls)
    if section is None:
        return words
    title, anchor = section
    return f"{words} The path from strength 0 to 1, and every decision: [{title}](../mathematics.md#{anchor})."


def _section(cls: type[Variant]) -> tuple[str, str] | None:
    """The section of the mathematics that has the name in its heading, or that the variant's module names."""
    headings = re.findall(r"^#{2,3} (.+)$", MATHEMATICS.read_text("utf-8"), flags=re.MULTILINE)
    named = re.search(r"mathematics\.md,\s+section\s+([^.]+)\.", inspect.getdoc(sys.modules[cls.__module__]) or "")
    for heading in headings:
        if f"`{cls.name}`" in heading or (named and heading == " ".join(named[1].split())):
            return heading, slug(heading)
    return None


def slug(heading: str) -> str:
    """The anchor of a heading."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower())


def _options(cls: type[Variant]) -> str:
    """A table of the options, with what the docstring of the options says about each."""
    fields = dataclasses.fields(cls.Options)
    if not fields:
        return f"`{cls.name}` has no options of its own. Every variant has a `strength` from 0 to 1."
    meanings = _meanings(cls.Options)
    rows = [(f"`{field.name}`", f"`{field.default!r}`", meanings.get(field.name, "")) for field in fields]
    return markdown(("option", "default", "meaning"), rows)


def _meanings(options: type[Any]) -> dict[str, str]:
    """What the docstrings of an options class and its bases say of each option."""
    by_name: dict[str, str] = {}
    for cls in reversed(options.__mro__):
        section = (inspect.cleandoc(cls.__doc__ or "")).partition("Attributes:\n")[2].partition("\n\n")[0]
        for name, text in re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, flags=re.MULTILINE):
            by_name[name] = " ".join(text.split())
    return by_name


def _composes(cls: type[Variant]) -> str:
    if cls.alone:
        return "no."
    places = ", ".join(cls.places)
    return f"yes, with every variant that does not change its places ({places})."


def _cost(name: str) -> str:
    """The rows of the table of speed, or where the cost is told."""
    parts = []
    if (table := speed_of(name)) is not None:
        parts.append(f"Ratios to stock attention, in two BERT-base layers; 1 is stock.\n\n{figures(table)}")
    if (table := long_texts_of(name)) is not None:
        parts.append(f"A small BERT on long texts; 1 is stock.\n\n{figures(table)}")
    where = "[Speed and memory](../results/speed.md) says what was measured, and how."
    if not parts and name in ELSEWHERE:
        return ELSEWHERE[name]
    return "\n\n".join([*(parts or ["Not measured yet in whole models."]), where])


def _results(name: str) -> str:
    """The recorded runs of the variant, alone or in a composition."""
    if not recorded(name):
        return ELSEWHERE.get(name, "No recorded run yet.")
    tables = {
        "Converted from pretrained weights": conversion_table(name),
        "From random weights": scratch_table(name),
    }
    parts = [f"**{title}**\n\n{figures(with_marks(table))}" for title, table in tables.items() if has_rows(table)]
    return "\n\n".join([*parts, "[Results](../results/index.md) says how to read these tables."])


def has_rows(table: str) -> bool:
    """False for a table of a header alone."""
    return table.count("\n") > 1
