"""`python -m docs.tables.architectures` holds every architecture of transformers and writes `docs/architectures.md`.

The models are tiny and have random weights; a run takes about a quarter of an hour on one core. An option writes the
page from the outcomes of an earlier run: `python -m docs.tables.architectures outcomes.jsonl`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from hf_attn_swap.core.table import markdown
from tests.architectures.walk import EXACT, LATE, NOT_BUILT, PART, REFUSED, WRONG, Outcome, walked, without_paths

PAGE = Path(__file__).parents[1] / "architectures.md"
VARIANT = "belief"
MEANING = {
    EXACT: "equals its stock attention at strength 0, changes at strength 1, and is stock bit for bit after unpatching",
    PART: "the same, for the layers that can be swapped (`layers=` chooses them); the sentence says why others cannot",
    REFUSED: "`patch_model` raises a `ValueError` with this sentence",
    LATE: "refused in the first forward pass only, which is a fault",
    WRONG: "neither exact nor refused, which is a fault",
    NOT_BUILT: "we found no small configuration or no inputs, so nothing is known",
}


def page(outcomes: list[Outcome], version: str) -> str:
    """The page: what was held against what, how many of each result, and one row per architecture."""
    counts = Counter(outcome.result for outcome in outcomes)
    nested = sum(outcome.nested for outcome in outcomes if outcome.result in (EXACT, PART))
    lines = [
        "# Architectures",
        "",
        f"Every model type that `AutoModel` of transformers {version} can build was built with few layers, small "
        f"widths and random weights, patched with `{VARIANT}` and compared with its stock attention on real (not "
        "padded) positions, with the shortcut of strength 0 and with the variant computed at strength 0. "
        f"{nested} of those that are exact have configurations within their configuration. "
        "`python -m docs.tables.architectures` writes this page; the slow test in `tests/architectures` compares "
        "with it.",
        "",
        markdown(
            ("result", "architectures", "meaning"),
            [(result, str(counts[result]), meaning) for result, meaning in MEANING.items()],
        ),
        "",
        markdown(
            ("model type", "result", "sentence"),
            [(each.model_type, each.result, _cell(each.sentence)) for each in outcomes],
        ),
    ]
    return "\n".join(lines) + "\n"


def known() -> dict[str, str]:
    """By model type, the result that the page says."""
    rows = [line.split("|") for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    results = {cells[1].strip(): cells[2].strip() for cells in rows}
    return {name: result for name, result in results.items() if result in MEANING}


def known_version() -> str:
    """The transformers of which the page speaks."""
    return PAGE.read_text("utf-8").partition("of transformers ")[2].partition(" ")[0]


def _cell(sentence: str) -> str:
    return without_paths(sentence).replace("<", "&lt;") or "–"


def main(arguments: list[str]) -> None:
    """Write the page from a new run, or from the file of outcomes that is named."""
    if arguments:
        lines = Path(arguments[0]).read_text("utf-8").splitlines()
        outcomes = [Outcome(**json.loads(line)) for line in lines if line.startswith("{")]
    else:
        outcomes = walked(VARIANT)
    for outcome in outcomes:
        if outcome.result in (LATE, WRONG):
            print(json.dumps(asdict(outcome)))
    PAGE.write_text(page(outcomes, transformers.__version__), encoding="utf-8")
    print(f"{PAGE}: {dict(Counter(each.result for each in outcomes))}, torch {torch.__version__}")


if __name__ == "__main__":
    main(sys.argv[1:])
