"""Progress bars, where somebody sees them: on a terminal and in a notebook, and not in a file or a log.

The environment variable TQDM_DISABLE hides all of them, as in tqdm itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import Any

from tqdm.auto import tqdm

_hidden = ContextVar("hidden", default=False)


def bar(things: Iterable[Any] | None = None, *, shown: bool = True, **how: Any) -> Any:
    """A bar of tqdm; an invisible one if it is not `shown`, or if nobody would see it."""
    return tqdm(things, disable=not (shown and visible()), **how)


def visible() -> bool:
    """True if somebody sees a bar. Of several processes, the first alone shows its bars."""
    if _hidden.get() or os.environ.get("TQDM_DISABLE") or int(os.environ.get("RANK", "0")):
        return False
    return sys.stderr.isatty() or "ipykernel.zmqshell" in sys.modules  # a notebook


def line(text: str) -> None:
    """Write a line above the bars, also into a log. Of several processes, the first alone writes."""
    if not (_hidden.get() or int(os.environ.get("RANK", "0"))):
        tqdm.write(text, file=sys.stderr)


def silent() -> bool:
    """True if the user wants no progress at all, in lines neither."""
    return _hidden.get()


@contextlib.contextmanager
def hidden() -> Iterator[None]:
    """Inside, no progress is shown."""
    before = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(before)
