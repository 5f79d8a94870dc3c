"""Which engine computes which variant: what `make test-engines` saw."""

from __future__ import annotations

import json
from pathlib import Path

from hf_attn_swap.text.table import markdown

RECORD = Path(__file__).parents[2] / "benchmarks" / "figures" / "engines.json"


def engines_table() -> str:
    """One row per attention, one column per engine."""
    record = json.loads(RECORD.read_text("utf-8"))
    columns = record["columns"]
    rows = [(f"`{attention}`", *(cells[column] for column in columns)) for attention, cells in record["rows"].items()]
    return markdown(("attention", *columns), rows)
