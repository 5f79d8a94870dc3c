"""The parts that all recipes share: arguments, data, metrics, one run per seed, and the record of a run."""

from .arguments import (
    ConversionArguments,
    DataArguments,
    ImageDataArguments,
    ModelArguments,
    ScratchArguments,
    TextDataArguments,
    json_object,
    made_of,
    parse,
    scratch_config,
)
from .compare import About, compare, launch, push_run
from .data import load_rows, load_splits
from .run import Outcome, Task, run

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
