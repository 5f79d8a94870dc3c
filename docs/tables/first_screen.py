"""The table of README's first screen in full, from the record that `recipes/first_screen.py` wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipes.first_screen import table

RECORD = Path(__file__).parents[2] / "recipes" / "figures" / "first-screen.json"


def first_screen() -> dict[str, dict[str, Any]]:
    """The figures of each model, by the name of its row; `stock` is the first."""
    models: dict[str, dict[str, Any]] = json.loads(RECORD.read_text("utf-8"))["models"]
    return models


def first_screen_table() -> str:
    """A row per conversion."""
    return table(first_screen())
