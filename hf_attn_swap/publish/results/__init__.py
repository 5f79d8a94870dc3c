"""The record of one run. Recipes write the record; cards, plots and tables read it."""

from .from_model import applied_swaps, read_swaps
from .parts import (
    RELATIONS,
    SCRATCH,
    AppliedSwap,
    BaseModel,
    Budget,
    Component,
    Cost,
    DataSet,
    Interval,
    Measured,
    Metric,
)
from .run import RESULTS_FILE, RunResult, versions

__all__ = [
    "RELATIONS",
    "RESULTS_FILE",
    "SCRATCH",
    "AppliedSwap",
    "BaseModel",
    "Budget",
    "Component",
    "Cost",
    "DataSet",
    "Interval",
    "Measured",
    "Metric",
    "RunResult",
    "applied_swaps",
    "read_swaps",
    "versions",
]
