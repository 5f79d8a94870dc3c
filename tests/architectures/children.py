"""Walks the registry in child processes, so that one architecture that dies or hangs takes no other with it.

A child prints one line of JSON when an architecture was built and fed, and one for each variant of it. Try one
with `python -m tests.architectures.children llama:belief,outeffhop bert:belief`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .tiny import NotBuiltError, registry
from .walk import NOT_BUILT, VARIANTS, WRONG, Outcome, compare, find

SECONDS, CHUNK = 60, 30
BUILT = "built"
Work = dict[str, list[str]]


def walked(
    variants: tuple[str, ...] = VARIANTS,
    names: list[str] | None = None,
    *,
    file: Path | None = None,
    processes: int = 1,
) -> list[Outcome]:
    """All architectures of the registry, or these, with each of these variants.

    Args:
        variants: the variants' names.
        names: the architectures; None means all of the registry.
        file: outcomes are added to this file as they come. What it holds already is not run again.
        processes: how many children run at once.
    """
    walk = Walk(file)
    names = registry() if names is None else names
    chunks = [names[start : start + CHUNK] for start in range(0, len(names), CHUNK)]
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(walk.run, [{name: list(variants) for name in chunk} for chunk in chunks]))
    return [walk.found[name, variant] for name in sorted(names) for variant in variants]


def read(file: Path) -> list[Outcome]:
    """The outcomes in a file of an earlier walk."""
    lines = file.read_text("utf-8").splitlines()
    return [Outcome(**json.loads(line)) for line in lines if line.startswith("{")]


class Walk:
    """The outcomes so far, and the file that they are added to."""

    def __init__(self, file: Path | None) -> None:
        earlier = read(file) if file is not None and file.exists() else []
        self.found = {(each.model_type, each.variant): each for each in earlier}
        self._file = file
        self._lock = threading.Lock()

    def run(self, work: Work) -> None:
        """Run these architectures with these variants, in as many children as die."""
        while left := self._left(work):
            built, code = self._child(left)
            for name, variants in list(self._left(work).items())[:1]:  # the child died here
                for variant in variants[:1] if name in built else variants:
                    result = WRONG if name in built else NOT_BUILT
                    self._keep(Outcome(name, variant, result, f"the process ended with {code}"))

    def _left(self, work: Work) -> Work:
        left = {name: [one for one in variants if (name, one) not in self.found] for name, variants in work.items()}
        return {name: variants for name, variants in left.items() if variants}

    def _child(self, work: Work) -> tuple[set[str], int]:
        """Run one child, and return what it could build and how it ended."""
        words = [f"{name}:{','.join(variants)}" for name, variants in work.items()]
        command = [sys.executable, "-m", "tests.architectures.children", *words]
        built: set[str] = set()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                if line.startswith(f'{{"{BUILT}"'):
                    built.add(json.loads(line)[BUILT])
                elif line.startswith('{"model_type"'):
                    self._keep(Outcome(**json.loads(line)))
        return built, child.returncode

    def _keep(self, outcome: Outcome) -> None:
        with self._lock:
            self.found[outcome.model_type, outcome.variant] = outcome
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as lines:
                    lines.write(json.dumps(asdict(outcome)) + "\n")


class TimeLimitError(BaseException):
    """One architecture took too long."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Stop what runs inside after this many seconds."""

    def stop(number: int, frame: Any) -> None:
        raise TimeLimitError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcomes(name: str, variants: list[str]) -> Iterator[Outcome]:
    """What becomes of one architecture with each of these variants. Prints that it was built, if it was."""
    try:
        with time_limit(SECONDS):
            stock = find(name)
    except (NotBuiltError, TimeLimitError) as problem:
        reason = str(problem) or f"took longer than {SECONDS} seconds"
        yield from (Outcome(name, variant, NOT_BUILT, reason) for variant in variants)
        return
    print(json.dumps({BUILT: name}), flush=True)
    for variant in variants:
        try:
            with time_limit(SECONDS):
                outcome = compare(stock, variant)
        except TimeLimitError:
            outcome = Outcome(name, variant, NOT_BUILT, f"took longer than {SECONDS} seconds")
        yield outcome


def main(words: list[str]) -> None:
    """Print the outcomes of the architectures and variants that are named, as `architecture:variant,variant`."""
    logging.disable(logging.CRITICAL)
    for word in words:
        name, _, variants = word.partition(":")
        for outcome in outcomes(name, variants.split(",") if variants else list(VARIANTS)):
            print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
