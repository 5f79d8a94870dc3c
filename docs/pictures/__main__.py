"""Draws all pictures: `python -m docs.pictures` (after a variant was added or changed)."""

from pathlib import Path

from .swap import FILE, draw

draw().savefig(Path(__file__).parent / FILE, dpi=160)
