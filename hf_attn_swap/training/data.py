"""Reads the rows to train and to measure on, and checks them before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import ClassLabel, Dataset, DatasetDict, Value, load_dataset

from ..conversion.rows import is_blank
from .arguments import DataArguments

READERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
MISSING = -1  # the label of a row whose true label is not public, in test splits on the Hub


def load_splits(data: DataArguments, *, labelled: bool = True) -> tuple[Dataset, Dataset, list[str]]:
    """The training sample, the held-out rows, and the names of the classes (none for plain text).

    Labels become numbers from 0. Their order is the order of the set's own class names, or the sorted order if the set
    names no classes.

    Raises:
        ValueError: a path, split or column does not exist, a split is empty, or a held-out row has a class that the
            training split lacks.
    """
    train, test = _read(data)
    for name, split in (("training", train), ("held-out", test)):
        _check(name, split, [*data.input_columns, *([data.label_column_name] if labelled else [])])
    if data.max_train_samples is not None:
        if data.max_train_samples > len(train):
            raise ValueError(
                f"max_train_samples is {data.max_train_samples}, but the training split has {len(train)} rows."
            )
        train = train.shuffle(seed=0).select(range(data.max_train_samples))
    if data.max_eval_samples is not None:
        test = test.select(range(min(data.max_eval_samples, len(test))))
    if not labelled:
        return train, test, []
    return _number(train, test, data.label_column_name)


def load_rows(
    source: str,
    config: str | None,
    split: str | None,
    column: str | Sequence[str],
    usual: Sequence[str] = ("test", "validation"),
) -> Dataset:
    """The rows of one split of a set on the Hub, a folder or a file. If no split is named, the first of `usual`.

    The split must have the column, or all of the columns.

    Raises:
        ValueError: a path, split or column does not exist, or there are no rows.
    """
    if Path(source).is_file() or (Path(source).suffix in READERS and not Path(source).is_dir()):
        rows = _file(source)
    else:
        found = _splits(source, config)
        there = [name for name in (*usual, *map(str, found)) if name in found]
        rows = _split(source, found, split or there[0])
    _check("chosen", rows, [column] if isinstance(column, str) else list(column))
    return rows


def filled_rows(rows: Dataset, columns: Sequence[str]) -> Dataset:
    """The rows without those that have a blank text, or none, in one of the columns. Images stay as they are.

    Raises:
        ValueError: no row is left.
    """
    texts = [name for name in columns if isinstance(rows.features[name], Value)]
    filled = rows.filter(lambda *row: not any(map(is_blank, row)), input_columns=texts) if texts else rows
    if not len(filled):
        raise ValueError(f"every row of column {' or '.join(map(repr, columns))} is blank.")
    return filled


def inputs_of(rows: Dataset, columns: Sequence[str]) -> Sequence[Any]:
    """What the rows hold for a model: the texts or images of one column, or the pairs of texts of two columns.

    Images are decoded when they are read.
    """
    if len(columns) == 1:
        found: Sequence[Any] = rows[columns[0]]
        return found
    return list(zip(*(rows[name] for name in columns), strict=True))


def _read(data: DataArguments) -> tuple[Dataset, Dataset]:
    if data.dataset_name is None:
        assert data.train_file is not None
        assert data.test_file is not None
        return _file(data.train_file), _file(data.test_file)
    found = _splits(data.dataset_name, data.dataset_config_name)
    return _split(data.dataset_name, found, data.train_split_name), _split(
        data.dataset_name, found, data.test_split_name
    )


def _splits(source: str, config: str | None) -> DatasetDict:
    if source.startswith((".", "/", "~")) and not Path(source).is_dir():
        raise ValueError(f"there is no folder {source!r}.")
    try:
        found = load_dataset(source, config)
    except Exception as problem:  # datasets raises a dozen types: not found, no files, no such configuration
        raise ValueError(f"the data set {source!r} cannot be read: {problem}") from problem
    assert isinstance(found, DatasetDict)
    return found


def _split(source: str, found: DatasetDict, name: str) -> Dataset:
    if name not in found:
        raise ValueError(f"{source!r} has no split {name!r}; it has {', '.join(map(str, found))}.")
    return found[name]


def _file(path: str) -> Dataset:
    suffix = Path(path).suffix
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r}.")
    if suffix not in READERS:
        raise ValueError(f"{path!r}: the file must end in {', '.join(READERS)}.")
    extra: dict[str, Any] = {"delimiter": "\t"} if suffix == ".tsv" else {}
    try:
        return load_dataset(READERS[suffix], data_files=path, split="train", **extra)
    except Exception as problem:  # datasets raises many types, also for a file without rows, and its parsers raise more
        raise ValueError(f"{path!r} holds no rows, or cannot be read: {problem!r}") from problem


def _check(name: str, split: Dataset, columns: list[str]) -> None:
    if missing := [column for column in columns if column not in split.column_names]:
        raise ValueError(f"the {name} split has no column {missing[0]!r}; it has {', '.join(split.column_names)}.")
    if not len(split):
        raise ValueError(f"the {name} split is empty.")


def _number(train: Dataset, test: Dataset, column: str) -> tuple[Dataset, Dataset, list[str]]:
    """Replace the labels by numbers from 0, and return the names of the classes too."""
    feature = train.features[column]
    for name, split in (("training", train), ("held-out", test)):
        if None in split[column]:
            raise ValueError(
                f"row {list(split[column]).index(None)} of the {name} split has no label; leave such rows out."
            )
    if isinstance(feature, ClassLabel):
        classes = list(feature.names)
        known: dict[Any, int] = {index: index for index in range(len(classes))}
    else:
        known = {value: index for index, value in enumerate(sorted(set(train[column]), key=_order))}
        classes = [str(value) for value in known]
    if len(classes) < 2:
        raise ValueError(f"column {column!r} has a single class, {classes}; there is nothing to learn.")
    for name, split in (("training", train), ("held-out", test)):
        for row, value in enumerate(split[column]):
            if value not in known:
                secret = " (the labels of this split are not public)" if value == MISSING else ""
                raise ValueError(
                    f"row {row} of the {name} split has the unknown label {value!r}{secret}; "
                    f"known: {', '.join(classes)}."
                )
    train, test = (
        split.map(lambda row: {"labels": known[row[column]]}, remove_columns=[column], desc="labels")
        for split in (train, test)
    )
    return train, test, classes


def _order(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value
