"""`python -m docs.tables.architectures` holds every architecture of transformers and writes `docs/architectures.md`.

The models are tiny and have random weights; a run takes about half an hour on one core. `--outcomes FILE.jsonl` keeps
each outcome as it comes: a run that was stopped goes on from there, and a whole file writes the page at once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from hf_attn_swap.describe import NOTHING
from hf_attn_swap.text.table import markdown
from tests.architectures.children import walked
from tests.architectures.tiny import without_paths
from tests.architectures.walk import EXACT, LATE, NOT_BUILT, PART, REFUSED, VARIANTS, WRONG, Outcome

from .model_names import called, has_attention

PAGE = Path(__file__).parents[1] / "architectures.md"
MEANING = {
    EXACT: "equals its stock attention at strength 0, changes at strength 1, and is stock bit for bit after unpatching",
    PART: "the same, for the layers that can be swapped (`layers=` chooses them); the sentence says why others cannot",
    REFUSED: "`patch_model` raises a `ValueError` with this sentence",
    LATE: "refused in a forward pass only, which is a fault",
    WRONG: "neither exact nor refused, which is a fault",
    NOT_BUILT: "not compared, so nothing is known; the sentence says why",
}
WHY_NOT_BUILT = (  # what the walk says, and what it means to a reader
    (r"requires? the (\S+) library", "transformers builds it with the library {}, which was not installed"),
    (r"million parameters", "it stays too large for this comparison, however small its configuration"),
    (r"took longer", "it took longer than a minute"),
    (r"no inputs found: no module was reached", "it was built, but our inputs reach none of its attention modules"),
    (r"no inputs found", "it was built, but takes none of our inputs"),
    (r"", "transformers builds no model from any of our small configurations"),
)
NO_ATTENTION = "it has no attention: transformers' source of it defines none."
NAMES = re.compile(
    r"\d\.\de[+-]\d+"  # sizes of errors
    r"|\w+(?:\.\w+)+"  # paths of modules
    r"|\b[A-Z][a-z0-9_]*[A-Z]\w*"  # classes
    rf"|\b(?:{'|'.join(sorted(VARIANTS, key=len, reverse=True))})\b"
    r"|\d+"
)


def page(outcomes: list[Outcome], version: str) -> str:
    """The page: what was held against what, the counts, a row per architecture, and each sentence once."""
    variants = [variant for variant in VARIANTS if any(outcome.variant == variant for outcome in outcomes)]
    by_place = {(outcome.model_type, outcome.variant): outcome for outcome in outcomes}
    types = sorted({outcome.model_type for outcome in outcomes})
    counts = Counter((outcome.result, outcome.variant) for outcome in outcomes)
    said = _sentences(outcomes)
    decoded = len({outcome.model_type for outcome in outcomes if outcome.ways and outcome.result in (EXACT, PART)})
    nested = len({outcome.model_type for outcome in outcomes if outcome.nested and outcome.result in (EXACT, PART)})

    def cell(model_type: str, variant: str) -> str:
        outcome = by_place[model_type, variant]
        number = said.get(_pattern(outcome), (0, []))[0]  # every result but "exact" has a sentence
        some = outcome.result in (EXACT, PART) and outcome.run < outcome.modules
        notes = [str(number)] * bool(number) + [f"{outcome.run} of {outcome.modules} ran"] * some
        return f"{outcome.result} ({'; '.join(notes)})" if notes else outcome.result

    parts = [
        "# Architectures",
        f"Every model type that `AutoModel` of transformers {version} can build was built with few layers, small "
        "widths and random weights. One variant of each place was patched on a copy and compared with the stock "
        "attention on real (not padded) positions, with the shortcut of strength 0 and with the variant computed at "
        f"strength 0. {decoded} of them decode with a cache: there, at strength 1, a prompt and three tokens one by "
        "one give the same as one pass without a cache, with and without padding on the left. "
        f"{nested} of those that are exact have configurations within their configuration. "
        "`python -m docs.tables.architectures` writes this page; the slow test in `tests/architectures` compares "
        "with it.",
        "Two are not built as their configurations start. PatchTSMixer has attention with `self_attn=True` alone. "
        'Informer has `attention_type="full"`: as it starts, its ProbSparse self-attention is code of its own, and '
        "`patch_model` refuses it with this reason. Autoformer has auto-correlation in the place of attention.",
        "What was not built, and any model of your own: `describe(model)` says in a second what could be swapped, and "
        "`patch_model` refuses what cannot be right.",
        "A number in brackets is the number of the sentence [below](#sentences). Where the inputs that we found do not "
        "reach every swapped module, the brackets say how many of them ran.",
        markdown(
            ("result", *(f"`{variant}`" for variant in variants), "meaning"),
            [
                (result, *(str(counts[result, variant]) for variant in variants), words)
                for result, words in MEANING.items()
            ],
        ),
        "## Model types",
        '<div class="filter" markdown>',
        markdown(
            ("family", "model type", *(f"`{variant}`" for variant in variants)),
            [(called(name), name, *(cell(name, variant) for variant in variants)) for name in types],
        ),
        "</div>",
        "## Sentences",
        "Each sentence is that of the first model type beside it. The others have the names of their own classes and "
        "modules in it.",
        markdown(
            ("number", "result", "sentence", "model types"),
            [
                (str(number), group[0].result, _words(group[0]), _who(group, len(variants)))
                for number, group in said.values()
            ],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _sentences(outcomes: list[Outcome]) -> dict[tuple[str, str], tuple[int, list[Outcome]]]:
    """The outcomes by what is said of them: a number, and everything of which this is said."""
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in sorted(outcomes, key=lambda outcome: outcome.model_type):
        if outcome.sentence:
            groups.setdefault(_pattern(outcome), []).append(outcome)
    order = sorted(groups.items(), key=lambda item: (list(MEANING).index(item[0][0]), -len(item[1])))
    return {pattern: (number, group) for number, (pattern, group) in enumerate(order, 1)}


def _pattern(outcome: Outcome) -> tuple[str, str]:
    """The result, and the sentence without the names and numbers that differ from model to model."""
    return outcome.result, NAMES.sub("…", _reason(outcome))


def _reason(outcome: Outcome) -> str:
    """The sentence of an outcome, for a reader: no error of another library, and no attention where there is none."""
    if outcome.result == NOT_BUILT:
        result = ((re.search(pattern, outcome.sentence), words) for pattern, words in WHY_NOT_BUILT)
        return next(words.format(*match.groups()) for match, words in result if match) + "."
    if NOTHING in outcome.sentence and not has_attention(outcome.model_type):
        return NO_ATTENTION
    return outcome.sentence


def _who(group: list[Outcome], variants: int) -> str:
    """The model types of which something is said, together where it is said of the same variants."""
    said_of: dict[str, list[str]] = {}
    for each in group:
        said_of.setdefault(each.model_type, []).append(each.variant)
    together: dict[tuple[str, ...], list[str]] = {}
    for name, names in said_of.items():
        together.setdefault(tuple(names), []).append(name)
    return "; ".join(
        f"{'all' if len(names) == variants else ', '.join(f'`{each}`' for each in names)}: {', '.join(types)}"
        for names, types in together.items()
    )


def _words(outcome: Outcome) -> str:
    return without_paths(_reason(outcome)).replace("<", "&lt;")


def known() -> dict[tuple[str, str], str]:
    """By model type and variant, the result that the page says."""
    table = PAGE.read_text("utf-8").partition("## Model types")[2].partition("## Sentences")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    variants = [name.strip("`") for name in rows[0][2:]]
    results = {
        (row[1], name): cell.partition(" (")[0] for row in rows for name, cell in zip(variants, row[2:], strict=True)
    }
    return {place: result for place, result in results.items() if result in MEANING}


def known_version() -> str:
    """The transformers of which the page speaks."""
    return PAGE.read_text("utf-8").partition("of transformers ")[2].partition(" ")[0]


def main() -> None:
    """Walk the registry, or what a file of outcomes lacks of it, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outcomes", type=Path, help="a file of outcomes to go on from, and to add to")
    parser.add_argument("--processes", type=int, default=1, help="how many architectures run at once")
    arguments = parser.parse_args()
    outcomes = walked(file=arguments.outcomes, processes=arguments.processes)
    for outcome in outcomes:
        if outcome.result in (LATE, WRONG):
            print(json.dumps(asdict(outcome)))
    PAGE.write_text(page(outcomes, transformers.__version__), encoding="utf-8")
    print(f"{PAGE}: {dict(Counter(each.result for each in outcomes))}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
