"""The table of the families that the package knows by name, made from the families themselves."""

from __future__ import annotations

from hf_attn_swap.families import FAMILIES
from hf_attn_swap.families.base import Family
from hf_attn_swap.text.table import markdown

APPLIES = {
    "core": "the attention module",
    "bert": "the module around it, with LayerNorm",
    "albert": "the attention module, with LayerNorm",
}


def families_table() -> str:
    """One Markdown row per family."""
    rows = []
    for family in sorted(FAMILIES.values(), key=lambda each: each.name):
        shared = "yes" if family.shared else "no"
        names = (family.name, f"`{family.core}`", shared, _projections(family), f"`{family.output}`")
        rows.append((*names, APPLIES[family.block]))
    header = ("family", "attention module", "layers share it", "Q, K, V", "W_o", "who applies W_o")
    return markdown(header, rows)


def _projections(family: Family) -> str:
    paths = dict.fromkeys((family.query, family.key, family.value))
    names = ", ".join(f"`{path}`" for path in paths)
    return f"{names} (one fused projection)" if len(paths) == 1 else names
