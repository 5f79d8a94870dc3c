"""Functions that memory.py and multiple_instance.py share: means and deviations, tables, files, and errors."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from matplotlib.figure import Figure

from hf_attn_swap.text.table import markdown

STYLES = ("-", "--", "-.", ":", (0, (5, 5)))  # different styles, so that curves that coincide can be seen


def spread(values: list[float]) -> tuple[float, float]:
    """The mean and the standard deviation of the values."""
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def table(names: list[str], values_of: dict[str, list[list[float]]]) -> str:
    """A Markdown table of percentages, with a row per query and a column per normalizer."""
    lines = []
    for asked, values in values_of.items():
        cells = (f"{100 * mean:.1f} ± {100 * deviation:.1f}" for mean, deviation in map(spread, values))
        lines.append((asked, *cells))
    return markdown(("", *names), lines)


def write(rows: list[dict[str, Any]], options: Any, **pictures: Figure) -> None:
    """Write each picture as NAME.png into `options.out`, and the rows as NAME.json under the first picture's name."""
    options.out.mkdir(parents=True, exist_ok=True)
    for name, picture in pictures.items():
        picture.savefig(options.out / f"{name}.png", dpi=150)
    content = json.dumps({"options": asdict(options), "rows": rows}, indent=1, default=lambda path: path.name)
    (options.out / f"{next(iter(pictures))}.json").write_text(content + "\n", encoding="utf-8")


def start(main: Callable[[], None]) -> None:
    """Run a recipe's main function. A wrong option or file becomes one line on stderr."""
    try:
        main()
    except (ValueError, OSError) as problem:
        sys.exit(f"error: {' '.join(str(problem).split())}")
