"""Runs another program in a process that has imported this package, so that the program loads converted models.

    python -m hf_attn_swap.run lm_eval --model hf --model_args pretrained=my-model
    python -m hf_attn_swap.run -m lm_eval --model hf --model_args pretrained=my-model

The first form takes the name of a console script, the second the name of a module, as `python -m` does. All words
after the name belong to the program, and the exit code is the program's.
"""

from __future__ import annotations

import functools
import importlib.util
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import transformers

from .saved import shim

USAGE = "name a program, as in `run lm_eval --tasks wikitext`, or a module, as in `run -m lm_eval --tasks wikitext`"


class _Transformers(type(transformers)):  # type: ignore[misc]  # a class that transformers chooses when it runs
    """transformers, with its classes under the names that the config.json of a swapped model has."""

    def __getattr__(self, name: str) -> Any:
        stock = shim.stock_name(name)
        return super().__getattr__(name) if stock == name else getattr(self, stock)


def find(words: Sequence[str]) -> Callable[[], object]:
    """Find the program that the words name, and set `sys.argv` to what it reads.

    Args:
        words: the name of a console script, or "-m" and the name of a module; then the arguments of the program.

    Returns:
        A function that runs the program to its end.

    Raises:
        ValueError: no program is named, or no console script or module of this name is installed.
    """
    module = words[:1] == ["-m"]
    named = list(words[1:] if module else words)
    if not named or named[0].startswith("-"):
        raise ValueError(f"{USAGE}.")
    program = _module(named[0]) if module else functools.partial(_call, _script(named[0]))
    sys.argv = named
    return functools.partial(_with_saved_names, program)


def _with_saved_names(program: Callable[[], object]) -> None:
    """Run a program that may find a class of transformers by the name in a config, as `transformers serve` does."""
    before = transformers.__class__
    transformers.__class__ = _Transformers
    try:
        program()
    finally:
        transformers.__class__ = before


def _script(name: str) -> EntryPoint:
    """The entry point of a console script."""
    for result in entry_points(group="console_scripts", name=name):
        return result
    raise ValueError(f"no Python package here installs a program {name!r}; {USAGE}.")


def _call(script: EntryPoint) -> None:
    """Do what the file of a console script does."""
    sys.exit(script.load()())


def _module(name: str) -> Callable[[], object]:
    """What `python -m` does. It looks for the module in the current folder first."""
    if "" not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        result = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # a part of a dotted name
        result = None
    if result is None:
        raise ValueError(f"there is no module {name!r} here; {USAGE}.")
    return functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)


def main() -> None:
    """Run the program that the command line names."""
    try:
        program = find(sys.argv[1:])
    except ValueError as problem:
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    program()


if __name__ == "__main__":
    main()
