"""Reads no more of a user's data than is needed.

Data that can be counted (a list, a `Dataset`) are read in random places. Other data, such as an `IterableDataset`, are
a stream: they are read from the first row on, and may have no end.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

SAMPLE = 256  # rows whose length tells how long the rows are
MOST_ROWS = 2**18  # of data that can be counted
LONG = 2**20  # letters: a longer text is read in parts


def countable(data: Any) -> bool:
    """True for data with a length and numbered rows; False for a stream."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def sample(count: int) -> range:
    """The numbers of some rows, spread evenly over `count` rows."""
    return range(0, count, max(1, count // SAMPLE))


def shuffled(count: int) -> Iterator[int]:
    """All numbers below `count`, each once, in a random order that is always the same.

    What it takes grows with the numbers that are asked for, and not with `count`.
    """
    draw = random.Random(0)
    moved: dict[int, int] = {}  # the numbers at the places that are left, as in the shuffle of Fisher and Yates
    for place in range(count):
        drawn = draw.randrange(place, count)
        number = moved.pop(place, place)
        if drawn != place:
            number, moved[drawn] = moved.get(drawn, drawn), number
        yield number


def runs(data: Any, size: int) -> Iterator[tuple[int, Sequence[Any]]]:
    """Rows as they are needed, each time with the number of the first: runs of neighbours in random places.

    A stream comes row by row, in its order.
    """
    if not countable(data):
        yield from ((number, [row]) for number, row in enumerate(data))
        return
    for place in shuffled(-(-len(data) // size)):
        start, stop = place * size, min((place + 1) * size, len(data))
        yield start, data[start:stop] if isinstance(data, Sequence) else [data[i] for i in range(start, stop)]


def first_rows(
    stream: Iterable[Any], size_of: Callable[[Any], float], most: float, fewest: int
) -> tuple[list[Any], bool]:
    """The first rows of a stream: of the size `most` together, and not fewer than `fewest`; True if these are all."""
    rows, size = [], 0.0
    for row in stream:
        rows.append(row)
        size += size_of(row)
        if size >= most and len(rows) >= fewest:
            return rows, False
    return rows, True


def parts_of(text: str) -> Iterator[str]:
    """The text, or the parts of a very long one, cut between two words."""
    start = 0
    while len(text) - start > LONG:
        stop = max(text.rfind(mark, start + 1, start + LONG) for mark in " \n")
        stop = start + LONG if stop < 0 else stop
        yield text[start:stop]
        start = stop
    yield text[start:]
