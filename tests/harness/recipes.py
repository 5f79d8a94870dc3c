"""The scripts of recipes/, which lie beside the package in a clone, and one of them run in this process."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import hf_attn_swap

RECIPES = Path(hf_attn_swap.__file__).parent.parent / "recipes"
needs_recipes = pytest.mark.skipif(not RECIPES.is_dir(), reason="recipes/ is not next to the installed package")
NO_SAVING = ("--save_strategy", "no")


def recipe(name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(RECIPES))
    runpy.run_path(str(RECIPES / name), run_name="__main__")
