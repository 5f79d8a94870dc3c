"""Reads a multivariate time series from a table, and checks it: even steps, finite numbers, no constant column."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset

Array = np.ndarray[Any, Any]


def read_series(table: Dataset, date_column: str, columns: Sequence[str], train_rows: int) -> Array:
    """The series (T,C), as z-scores whose mean and deviation come from the first `train_rows` rows.

    Args:
        table: the table, with one row per date.
        date_column: name of the column of dates such as 2016-07-01 00:00:00, at even steps.
        columns: names of the columns of numbers; every column but the dates if empty.
        train_rows: number of rows that means and deviations are taken from.

    Raises:
        ValueError: the dates cannot be read, are out of order, have gaps or repeat; or a column is unknown, holds a
            value that is not a finite number, or never changes in the training rows.
    """
    rows = table.to_dict()
    check_steps(rows.pop(date_column), date_column)
    names = list(columns) or list(rows)
    for name in names:
        if name not in rows:
            raise ValueError(f"the series has no column {name!r} of numbers; it has {', '.join(rows)}.")
        for row, value in enumerate(rows[name]):
            if not finite(value):
                raise ValueError(f"row {row} of column {name!r}: {value!r} is no finite number; name other --columns.")
    series_TC = np.array([rows[name] for name in names], dtype=np.float64).T
    train_TC = series_TC[:train_rows]
    constant = np.ptp(train_TC, axis=0) == 0
    if constant.any():
        name = names[int(constant.argmax())]
        raise ValueError(f"column {name!r} never changes in the training part; name other --columns.")
    scores: Array = (series_TC - train_TC.mean(0)) / train_TC.std(0)
    return scores


def finite(value: Any) -> bool:
    """True for a finite number, also if it is written as text. One word in a column makes the whole column text."""
    try:
        return math.isfinite(float(value))
    except (TypeError, ValueError):
        return False


def check_steps(texts: Sequence[Any], column: str) -> None:
    """Refuse dates whose steps are not all equal.

    Raises:
        ValueError: names the first two dates that do not follow each other at the usual step.
    """
    try:
        dates = np.array(texts, dtype="datetime64[s]")
    except ValueError as problem:
        raise ValueError(f"{column!r} must hold dates such as 2016-07-01 00:00:00: {problem}.") from None
    steps = np.diff(dates)
    usual = np.median(np.abs(steps[~np.isnat(steps)]))
    for before, after, step in zip(dates, dates[1:], steps, strict=False):
        if step != usual or step <= np.timedelta64(0):
            raise ValueError(f"{after} follows {before}, not {usual} later; sort rows, fill gaps, drop what repeats.")
