"""The README's table of variants, made from the registry: `python -m tests.readme` prints it."""

from __future__ import annotations

import dataclasses

from hf_attn_swap import list_variants
from hf_attn_swap.registry import get_variant


def variants_table() -> str:
    """One Markdown row per registered variant."""
    lines = [
        "| name | what changes | formula | options | extra parameters | fused form | paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in list_variants():
        cls = get_variant(name)
        options = ", ".join(f"`{field.name}={field.default!r}`" for field in dataclasses.fields(cls.Options))
        cells = (
            f"`{name}`",
            cls.summary,
            f"`{cls.formula}`",
            options or "–",
            cls.parameters_added,
            cls.fused,
            cls.paper,
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(variants_table())
