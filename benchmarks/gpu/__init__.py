"""Figures of a GPU: `python -m benchmarks.gpu --out FOLDER` in a checkout; see `__main__.py`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the other benchmarks import each other by their names
