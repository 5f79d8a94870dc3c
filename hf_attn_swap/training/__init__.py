"""The parts that all recipes share: arguments, data, metrics, one run per seed, and the record of a run."""

from .arguments import (
    ConversionArguments,
    DataArguments,
    ImageDataArguments,
    ModelArguments,
    ScratchArguments,
    TextDataArguments,
    parse,
)
from .compare import compare, launch, push_run
from .data import load_rows, load_splits
from .outcome import Outcome
from .publish import About
from .run import Task, run
from .scratch import json_object, made_of, scratch_config

__all__ = [
    "About",
    "ConversionArguments",
    "DataArguments",
    "ImageDataArguments",
    "ModelArguments",
    "Outcome",
    "ScratchArguments",
    "Task",
    "TextDataArguments",
    "compare",
    "json_object",
    "launch",
    "load_rows",
    "load_splits",
    "made_of",
    "parse",
    "push_run",
    "run",
    "scratch_config",
]
