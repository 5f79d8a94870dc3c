"""Draws all pictures: `python -m docs.pictures` (after a variant was added or changed)."""

from pathlib import Path

from . import memory
from .swap import DARK, DARK_FILE, FILE, LIGHT, draw

for file, colours in ((FILE, LIGHT), (DARK_FILE, DARK)):
    draw(colours).savefig(Path(__file__).parent / file, dpi=160)
memory.draw().savefig(Path(__file__).parent / memory.FILE, dpi=110)
