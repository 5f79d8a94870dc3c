"""Takes the steps of a conversion, one after another: each is run and written into the journal, or recalled from it.

A step is a function of a `State`. If it returns nothing, it is one part of a conversion, with the name of the function.
A longer step is a generator of parts. The journal keeps each part by itself, so a killed conversion goes on after the
last part that was finished. Between its parts, a step reads the state and changes nothing.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tqdm.auto import tqdm

from ..measuring.lost import Lost
from .outcome import StepRecord, in_words
from .processes import broadcast_from_rank0
from .state import State

Step = Callable[[State], Any]


@dataclass(frozen=True)
class Found:
    """What a part says of itself, for its row of the report.

    Attributes:
        name: its name in the report, if the work decides it.
        lost: what the model loses now, if the work has measured it.
    """

    name: str | None = None
    lost: Lost | None = None


@dataclass(frozen=True)
class Part:
    """A part of a step.

    Attributes:
        name: in the journal, and in the report.
        run: does the work.
        measured: the loss is measured afterwards, and the part has a row in the report.
        again: a resumed conversion does the work again, because it is quick and always gives the same. Otherwise it
            reads what the work has left.
    """

    name: str
    run: Callable[[State], Found | None]
    measured: bool = True
    again: bool = False


def name_of(step: Step) -> str:
    """The name of a step."""
    return step.__name__.replace("_", " ")


def take(state: State, steps: Iterable[Step]) -> None:
    """Take steps in their order.

    Raises:
        ValueError: two parts have the same name, or a journal holds other parts.
    """
    for step in steps:
        for part in _parts(step, state):
            _take(state, part)


def _parts(step: Step, state: State) -> Iterator[Part]:
    if inspect.isgeneratorfunction(step):
        yield from step(state)
    else:
        yield Part(name_of(step), step, measured=state.held is not None)


def _take(state: State, part: Part) -> None:
    if part.name in state.parts:
        raise ValueError(f"two parts of a conversion are called {part.name!r}; give one of them another name.")
    state.parts.add(part.name)
    start, left = time.perf_counter(), state.budget.left
    found = _worked(state, part) or Found()
    if part.measured:
        _measure(state, part, found, tokens=left - state.budget.left, start=start)


def _worked(state: State, part: Part) -> Found | None:
    """Do the work of a part, or take over what it left in an earlier run."""
    journal = state.journal
    if part.again:
        return part.run(state)
    key = f"{part.name}: work"
    if (known := journal.recall(key)) is not None:
        state.read(known["left"], journal.load(part.name))
        return None if known["found"] is None else Found(known["found"]["name"], _lost(known["found"]["lost"]))
    found = part.run(state)
    state.notes = broadcast_from_rank0(state.notes, state.args)  # what the steps choose
    if journal.folder is not None:
        left, tensors = state.written()
        journal.save(part.name, tensors)
        journal.write(key, {"left": left, "found": None if found is None else asdict(found)})
    return found


def _measure(state: State, part: Part, found: Found, *, tokens: int, start: float) -> None:
    """Measure the model as it is, and add a row to the record."""
    if (known := state.journal.recall(part.name)) is not None:
        state.record.append(StepRecord.from_dict(known))
        return
    row = StepRecord(
        name=found.name or part.name,
        layers=state.layers,
        lost=found.lost or state.lost(),
        tokens=tokens,
        seconds=time.perf_counter() - start,
    )
    state.record.append(row)
    state.journal.write(part.name, asdict(row))
    if state.progress:
        words = f"{row.name}: {len(row.layers)} layers, {row.lost.measure} {in_words(row.lost)}"
        tqdm.write(words, file=sys.stderr)


def _lost(values: dict[str, Any] | None) -> Lost | None:
    return None if values is None else Lost.from_dict(values)
