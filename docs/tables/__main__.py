"""`python -m docs.tables` writes every table of README anew."""

from . import CARDS, written

readme = CARDS.parent / "README.md"
readme.write_text(written(readme.read_text("utf-8")), encoding="utf-8")
