"""Says as Markdown which cells of the doctor and which test files broke: `summary.py NAME doctor.json tests.xml`.

`.github/workflows/canary.yml` calls it with what `hf-attn-swap doctor --json` and `pytest --junitxml` wrote.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

LONGEST = 200  # characters of a message


def doctor(path: Path) -> Iterator[str]:
    """The cells that are wrong, one row each; and the versions that were installed."""
    try:
        diagnosis = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        yield "**The doctor gave no answer**: the installation failed, or the doctor itself; see the log."
        return
    versions = ", ".join(f"{name} {version}" for name, version, *_ in diagnosis["packages"])
    wrong = [tuple(cell) for cell in diagnosis["cells"] if cell[2].startswith("WRONG")]
    yield f"Installed: {versions}."
    yield (
        f"Doctor: **{len(wrong)} of {len(diagnosis['cells'])} cells are wrong**."
        if wrong
        else "Doctor: no cell is wrong."
    )
    yield from table(("family", "variant", "result"), wrong)


def tests(path: Path) -> Iterator[str]:
    """The test files with failures, one row per file."""
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        yield "**The tests did not run to their end**; see the log."
        return
    failed, first = Counter[str](), dict[str, str]()
    for case in cases:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        if problem is not None:
            file = (case.get("classname") or case.get("name") or "").replace(".", "/") + ".py"
            failed[file] += 1
            first.setdefault(file, f"{case.get('name')}: {problem.get('message', '')}")
    skipped = sum(case.find("skipped") is not None for case in cases)
    count = failed.total()
    shown = f"**{count} failed**" if count else "0 failed"
    yield f"Tests: {len(cases) - skipped - count} passed, {skipped} skipped, {shown}."
    yield from table(
        ("file", "failed", "the first one"),
        [(file, str(number), first[file]) for file, number in failed.most_common()],
    )


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    """A table in Markdown; nothing if there are no rows."""
    if rows:
        yield "\n".join(f"| {' | '.join(map(plain, row))} |" for row in (header, ["---"] * len(header), *rows))


def plain(text: str) -> str:
    """Text in one line of a table."""
    line = " ".join(text.replace("|", "\\|").split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"


if __name__ == "__main__":
    name, doctor_file, tests_file = sys.argv[1:]
    print(f"## {name}", *doctor(Path(doctor_file)), *tests(Path(tests_file)), sep="\n\n")
