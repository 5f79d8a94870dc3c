"""`python -m docs.tables.architectures` holds every architecture of transformers and writes its record.

The record, `architectures.json`, is what the tables of the page `docs/architectures.md` are made from.

The models are tiny and have random weights; a run takes about an hour on one core. `--outcomes FILE.jsonl` keeps
each outcome as it comes: a run that was stopped goes on from there, and a whole file writes the record at once.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_attn_swap.describe import NOTHING
from hf_attn_swap.text.table import markdown
from tests.architectures.children import walked
from tests.architectures.tiny import without_paths
from tests.architectures.walk import EXACT, LATE, NOT_BUILT, PART, REFUSED, VARIANTS, WRONG, Outcome

from .model_names import called, has_attention

RECORD = Path(__file__).with_name("architectures.json")
Record = dict[str, Any]
# What the tests walk has one variant of each place; the page has these besides.
SHOWN = (*VARIANTS, "entmax15", "gated", "window")
MEANING = {
    EXACT: "equals its stock attention at strength 0, changes at strength 1, and is stock bit for bit after unpatching",
    PART: "the same, for the layers that can be swapped (`layers=` chooses them); the sentence says why others cannot",
    REFUSED: "`patch_model` raises a `ValueError` with this sentence",
    LATE: "refused in a forward pass only, which is a fault",
    WRONG: "neither exact nor refused, which is a fault",
    NOT_BUILT: "not compared, so nothing is known; the sentence says why",
}
SHORT = {EXACT: "✓", PART: "part", REFUSED: "no", LATE: "late", WRONG: "wrong", NOT_BUILT: "–"}
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
    rf"|\b(?:{'|'.join(sorted(SHOWN, key=len, reverse=True))})\b"
    r"|\d+"
)


def record(outcomes: list[Outcome], version: str) -> Record:
    """What the page is made from: counts, a row per architecture, and each sentence once."""
    variants = [variant for variant in SHOWN if any(outcome.variant == variant for outcome in outcomes)]
    by_place = {(outcome.model_type, outcome.variant): outcome for outcome in outcomes}
    said = _sentences(outcomes)
    right = [outcome for outcome in outcomes if outcome.result in (EXACT, PART)]

    def cell(outcome: Outcome) -> str:
        number = said.get(_pattern(outcome), (0, []))[0]  # every result but "exact" has a sentence
        some = outcome.result in (EXACT, PART) and outcome.run < outcome.modules
        notes = [str(number)] * bool(number) + [f"{outcome.run} of {outcome.modules} ran"] * some
        return f"{outcome.result} ({'; '.join(notes)})" if notes else outcome.result

    return {
        "transformers": version,
        "decoded": len({outcome.model_type for outcome in right if outcome.ways}),
        "nested": len({outcome.model_type for outcome in right if outcome.nested}),
        "variants": variants,
        "types": {
            name: [called(name), *(cell(by_place[name, variant]) for variant in variants)]
            for name in sorted({outcome.model_type for outcome in outcomes})
        },
        "sentences": [
            [str(number), group[0].result, _words(group[0]), group[0].model_type] for number, group in said.values()
        ],
    }


def counts_table() -> str:
    """What was held, and how often each result came."""
    known_record = read()
    variants = known_record["variants"]
    counts = Counter((result, variant) for (_, variant), result in known().items())
    lead = (
        f"transformers {known_record['transformers']}. {known_record['decoded']} of the exact model types decode with "
        f"a cache, and {known_record['nested']} have configurations within their configuration."
    )
    rows = [
        (SHORT[result], *(str(counts[result, variant]) for variant in variants), words)
        for result, words in MEANING.items()
        if any(counts[result, variant] for variant in variants)
    ]
    return f"{lead}\n\n{markdown(('', *(f'`{variant}`' for variant in variants), 'meaning'), rows)}"


def architectures_table() -> str:
    """A row per model type, in short cells: a sign for the result, and the number of its sentence."""
    known_record = read()
    header = ("family", "model type", *(f"`{variant}`" for variant in known_record["variants"]))
    rows = [
        (family, name, *(_short(cell) for cell in cells)) for name, (family, *cells) in known_record["types"].items()
    ]
    return f'<div class="filter" markdown>\n\n{markdown(header, rows)}\n\n</div>'


def sentences_table() -> str:
    """Each sentence once, with a model type of which it is said."""
    rows = [(number, SHORT[result], words, name) for number, result, words, name in read()["sentences"]]
    return markdown(("number", "", "sentence", "for example"), rows)


def _short(cell: str) -> str:
    result, _, notes = cell.partition(" (")
    number, _, some = notes.removesuffix(")").partition("; ")
    if "ran" in number:
        number, some = "", number
    return " ".join(word for word in (SHORT[result], number, f"({some})" if some else "") if word)


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


def _words(outcome: Outcome) -> str:
    return without_paths(_reason(outcome)).replace("<", "&lt;")


def read() -> Record:
    """The record of the last walk."""
    known_record: Record = json.loads(RECORD.read_text("utf-8"))
    return known_record


def known() -> dict[tuple[str, str], str]:
    """By model type and variant, the result of the last walk."""
    known_record = read()
    return {
        (name, variant): cell.partition(" (")[0]
        for name, (_, *cells) in known_record["types"].items()
        for variant, cell in zip(known_record["variants"], cells, strict=True)
    }


def known_version() -> str:
    """The transformers of the last walk."""
    return str(read()["transformers"])


def written(new: Record) -> str:
    """A record as JSON, one line for each model type and for each sentence."""
    return re.sub(r"\n {3,}|\n {2}(?=\])", " ", json.dumps(new, indent=1, ensure_ascii=False)) + "\n"


def main() -> None:
    """Walk the registry, or what a file of outcomes lacks of it, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outcomes", type=Path, help="a file of outcomes to go on from, and to add to")
    parser.add_argument("--processes", type=int, default=1, help="how many architectures run at once")
    arguments = parser.parse_args()
    outcomes = walked(SHOWN, file=arguments.outcomes, processes=arguments.processes)
    for outcome in outcomes:
        if outcome.result in (LATE, WRONG):
            print(json.dumps(asdict(outcome)))
    RECORD.write_text(written(record(outcomes, transformers.__version__)), encoding="utf-8")
    print(f"{RECORD}: {dict(Counter(each.result for each in outcomes))}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
