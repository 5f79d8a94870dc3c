"""Labels of figures that were measured under older names, in canonical names."""

from __future__ import annotations

import re

from hf_attn_swap.layer.registry import canonical_name


def canonical_label(label: str) -> str:
    """The same label with the canonical name of the variant that it starts with, as in "belief, compiled"."""
    return re.sub(r"^[\w+]+", lambda found: canonical_name(found[0]), label)
