"""Reads no more of a user's data than is needed.

Data that can be counted (a list, a `Dataset`) are read in places that lie evenly over all of them. Other data, such as
an `IterableDataset`, are a stream: they are read from the first row on, and may have no end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

SAMPLE = 256  # rows whose length tells how long the rows are
MOST_ROWS = 2**18  # of data that can be counted
LONG = 2**20  # letters: a longer text is read in parts
GOLDEN = (math.sqrt(5) - 1) / 2


def countable(data: Any) -> bool:
    """True for data with a length and numbered rows; False for a stream."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def sample(count: int) -> range:
    """The numbers of some rows, spread evenly over `count` rows."""
    return range(0, count, max(1, count // SAMPLE))


def spread(count: int) -> Iterator[int]:
    """All numbers below `count`, each once, in an order of which every beginning lies evenly over all of them.

    The steps have the length of the golden section.
    """
    step = max(1, round(GOLDEN * count))
    while math.gcd(step, count) > 1:
        step += 1
    return (place * step % count for place in range(count))


def runs(data: Any, size: int) -> Iterator[tuple[int, Sequence[Any]]]:
    """Rows as they are needed, each time with the number of the first: runs of neighbours in places that are spread.

    A stream comes row by row, in its order.
    """
    if not countable(data):
        yield from ((number, [row]) for number, row in enumerate(data))
        return
    for place in spread(-(-len(data) // size)):
        start, stop = place * size, min((place + 1) * size, len(data))
        yield start, data[start:stop] if isinstance(data, Sequence) else [data[i] for i in range(start, stop)]


def first_rows(
    stream: Iterable[Any], size_of: Callable[[Any], float], most: float, fewest: int
) -> tuple[list[Any], bool]:
    """The first rows of a stream: of the size `most` together, and not fewer than `fewest`; True if these are all."""
    found, size = [], 0.0
    for row in stream:
        found.append(row)
        size += size_of(row)
        if size >= most and len(found) >= fewest:
            return found, False
    return found, True


def parts_of(text: str) -> Iterator[str]:
    """The text, or the parts of a very long one, cut between two words."""
    start = 0
    while len(text) - start > LONG:
        stop = max(text.rfind(mark, start + 1, start + LONG) for mark in " \n")
        stop = start + LONG if stop < 0 else stop
        yield text[start:stop]
        start = stop
    yield text[start:]
