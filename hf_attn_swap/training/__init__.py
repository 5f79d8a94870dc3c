"""What the recipes share: arguments from YAML and the command line, data, metrics, one run, its record."""

from .arguments import ConversionArguments, DataArguments, ModelArguments, parse
from .data import load_splits
from .outcome import Outcome
from .publish import publish
from .run import Task, run

__all__ = [
    "ConversionArguments",
    "DataArguments",
    "ModelArguments",
    "Outcome",
    "Task",
    "load_splits",
    "parse",
    "publish",
    "run",
]
