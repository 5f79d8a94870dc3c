"""Reads the rows to train and to measure on, and checks them before anything is trained."""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from datasets import ClassLabel, Dataset, Image, IterableDataset, load_dataset, load_dataset_builder
from torch.utils.data import StackDataset

from ..conversion.rows import is_blank
from .arguments import DataArguments

READERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
CLOSED = (".json", ".jsonl", ".parquet", ".txt")  # files that are closed after a part of them was read as a stream
LARGE = 500_000_000  # bytes: larger data are read as a stream
BUFFER = 1000  # rows among which a stream is shuffled
MISSING = -1  # the label of a row whose true label is not public, in test splits on the Hub
USUAL = ("test", "validation")  # the splits of held-out rows


def load_splits(
    data: DataArguments, *, labelled: bool = True, regression: bool = False
) -> tuple[Dataset, Dataset, list[str]]:
    """The training sample, the held-out rows, and the names of the classes (none for plain text and a regression).

    Labels become numbers from 0. Their order is the order of the set's own class names, or the sorted order if the set
    names no classes. The labels of a regression stay the numbers that they are.

    Raises:
        ValueError: a path, split or column does not exist, a split is empty, a held-out row has a class that the
            training split lacks, or a label of a regression is no number, or there is one number alone.
    """
    train, test = _load_both(data)
    columns = [*data.input_columns, *([data.label_column_name] if labelled else [])]
    train, test = _checked("training", train, columns), _checked("held-out", test, columns)
    if data.max_train_samples is not None:
        if data.max_train_samples > len(train):
            raise ValueError(
                f"max_train_samples is {data.max_train_samples}, but the training split has {len(train)} rows."
            )
        if not data.streaming:
            train = train.shuffle(seed=0).select(range(data.max_train_samples))
    if data.max_eval_samples is not None:
        test = test.select(range(min(data.max_eval_samples, len(test))))
    if not labelled:
        return train, test, []
    if regression:
        _check_numbers("training", train[data.label_column_name])
        _check_numbers("held-out", test[data.label_column_name])
        classes: list[str] = []
        number_of: Callable[[Any], float] = float
    else:
        numbers, classes = _numbers_of_classes(train, test, data.label_column_name)
        number_of = numbers.__getitem__
    train, test = (
        split.map(
            lambda row: {"labels": number_of(row[data.label_column_name])},
            remove_columns=[data.label_column_name],
            desc="labels",
        )
        for split in (train, test)
    )
    return train, test, classes


def load_rows(
    source: str, config: str | None, split: str | None, column: str | Sequence[str], usual: Sequence[str] = USUAL
) -> Dataset:
    """All rows of one split, as `open_rows` finds it, and no stream of them."""
    return cast(Dataset, open_rows(source, config, split, column, usual, stream=False))


def open_rows(
    source: str,
    config: str | None,
    split: str | None,
    column: str | Sequence[str],
    usual: Sequence[str] = USUAL,
    *,
    stream: bool | None = None,
    in_order: bool = False,
) -> Dataset | IterableDataset:
    """The rows of one split of a set on the Hub, a folder or a file, or a stream of them.

    Args:
        source: a set on the Hub, a folder or a file.
        config: the configuration of the set.
        split: the split, or a share of it such as "train[:10%]", as `datasets` reads it; None takes the first of
            `usual`.
        column: the column, or the columns, that the split must have.
        usual: the splits that are looked for.
        stream: True reads a stream. None does so if the data are larger than 500 MB, or if the Hub does not say how
            large they are.
        in_order: the first rows alone will be read; a file is then a stream also if it is small, except a table of CSV.
            Otherwise a stream of a set is shuffled among 1,000 rows, always in the same way; the lines of a text file
            keep their order.

    Raises:
        ValueError: a path, split or column does not exist, there are no rows, or a stream is asked for a part of a
            split.
    """
    path, sliced = Path(source), split is not None and "[" in split
    if stream is None:
        first_rows_of_file = in_order and not sliced and path.is_file() and path.suffix in CLOSED
        stream = first_rows_of_file or _is_large(source, config)
    if sliced and stream:
        raise ValueError(
            f"{split!r} is a part of a split, which a stream does not have; name the whole split, of which no more is "
            "read than is needed, or read no stream (--no-stream)."
        )
    if path.is_file() or (path.suffix in READERS and not path.is_dir()):
        rows = _load_file(source, split or "train", stream=stream)
    elif sliced:
        rows = _call(load_dataset, source, config, split=split)
    else:
        splits = _call(load_dataset, source, config, streaming=stream)
        rows = _split(source, splits, split or next(name for name in (*usual, *map(str, splits)) if name in splits))
    rows = _checked("chosen", rows, [column] if isinstance(column, str) else list(column))
    if isinstance(rows, IterableDataset) and not in_order and path.suffix != ".txt":
        return rows.shuffle(seed=0, buffer_size=BUFFER)
    return cast("Dataset | IterableDataset", rows)


def column_names(rows: Dataset | IterableDataset) -> list[str]:
    """The names of the columns; of a stream, those of its first row, if it does not name them."""
    return list(rows.column_names or next(iter(rows), {}))


def filled_rows(rows: Dataset | IterableDataset, columns: Sequence[str], label: str | None = None) -> Iterator[Any]:
    """The values of the columns, row by row, without rows in which one of them is missing or a blank text.

    A row of one column is its value; of two, a pair. With `label`, each comes with the value of this column.

    Raises:
        ValueError: no row is left.
    """
    blank = True
    for row in rows.select_columns(list(dict.fromkeys([*columns, *([] if label is None else [label])]))):
        if not any(is_blank(row[name]) for name in columns):
            blank, value = False, _value(row, columns)
            yield value if label is None else (value, row[label])
    if blank:
        raise ValueError(f"every row of column {' or '.join(map(repr, columns))} is blank.")


def inputs_of(rows: Dataset | IterableDataset, columns: Sequence[str]) -> Any:
    """What the rows hold for a model: the texts or images of one column, or the pairs of texts of two columns.

    They are read when they are used: a sequence, or a stream.
    """
    if isinstance(rows, IterableDataset):
        return _Stream(rows, tuple(columns))
    return rows[columns[0]] if len(columns) == 1 else StackDataset(*(rows[name] for name in columns))


@dataclass(frozen=True)
class _Stream:
    """The texts, images or pairs of texts of a stream."""

    rows: IterableDataset
    columns: tuple[str, ...]

    def __iter__(self) -> Iterator[Any]:
        features = self.rows.features or {}
        images = [name for name in self.columns if isinstance(features.get(name), Image)]
        for row in _undecoded(self.rows).select_columns(list(self.columns)):
            files = {name: _ImageFile(row[name], features[name]) for name in images if row[name] is not None}
            yield _value({**row, **files}, self.columns)


@dataclass(frozen=True)
class _ImageFile:
    """An image as the bytes of its file, which take less memory than its pixels."""

    file: dict[str, Any]
    feature: Image

    def convert(self, mode: str) -> Any:
        """The image, decoded as its column says."""
        return self.feature.decode_example(self.file).convert(mode)


def _value(row: dict[str, Any], columns: Sequence[str]) -> Any:
    """The value of one column, or the values of several."""
    values = tuple(row[name] for name in columns)
    return values[0] if len(values) == 1 else values


def _load_both(data: DataArguments) -> tuple[Any, Any]:
    """The training split and the held-out split; of streams, the samples, as they come."""
    if data.dataset_name is None:
        train, test = (_load_file(str(file), stream=data.streaming) for file in (data.train_file, data.test_file))
    else:
        splits = _call(load_dataset, data.dataset_name, data.dataset_config_name, streaming=data.streaming)
        names = data.train_split_name, data.test_split_name
        train, test = (_split(data.dataset_name, splits, name) for name in names)
    if not data.streaming:
        return train, test
    train = train.shuffle(seed=0, buffer_size=BUFFER)
    return _first_rows(train, data.max_train_samples), _first_rows(test, data.max_eval_samples)


def _first_rows(rows: IterableDataset, count: int | None) -> Dataset:
    """The first rows of a stream as a `Dataset`."""
    assert count is not None
    return Dataset.from_list(list(_undecoded(rows).take(count)), features=rows.features)


def _undecoded(rows: IterableDataset) -> IterableDataset:
    """The rows with the bytes of their images' files."""
    return rows.decode(False) if rows.features else rows


def _is_large(source: str, config: str | None) -> bool:
    """True if the data are large, or of a size that is not known."""
    path = Path(source)
    if path.exists():
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        return sum(file.stat().st_size for file in files) > LARGE
    if path.suffix in READERS:
        return False
    size = _call(load_dataset_builder, source, config).info.download_size
    return size is None or size > LARGE


def _call(load: Callable[..., Any], source: str, config: str | None, **options: Any) -> Any:
    """Call a function of `datasets` for a set on the Hub or a folder.

    Raises:
        ValueError: there is no such folder, its path would be a pattern, or the set cannot be read.
    """
    folder = Path(source)
    if source.startswith((".", "/", "~")) and not folder.is_dir():
        raise ValueError(f"there is no folder {source!r}.")
    if folder.is_dir() and _pattern(folder) != str(folder.resolve()):
        raise ValueError(
            f"the path {str(folder.resolve())!r} has one of the signs *, ? and [, which datasets takes for a pattern; "
            "rename the folder, or name a file."
        )
    try:
        return load(source, config, **options)
    except Exception as problem:  # datasets raises a dozen types: not found, no files, no such configuration
        raise ValueError(f"the data set {source!r} cannot be read: {problem}") from problem


def _pattern(path: Path) -> str:
    """The pattern of this path alone."""
    return glob.escape(str(path.resolve()))


def _split(source: str, splits: Any, name: str) -> Any:
    if name not in splits:
        raise ValueError(f"{source!r} has no split {name!r}; it has {', '.join(map(str, splits))}.")
    return splits[name]


def _load_file(path: str, split: str = "train", *, stream: bool = False) -> Any:
    suffix = Path(path).suffix
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r}.")
    if suffix not in READERS:
        raise ValueError(f"{path!r}: the file must end in {', '.join(READERS)}.")
    if split.partition("[")[0] != "train":
        raise ValueError(f"the file {path!r} has no split {split!r}; it is all of train.")
    extra: dict[str, Any] = {"delimiter": "\t"} if suffix == ".tsv" else {}
    try:
        return load_dataset(READERS[suffix], data_files=_pattern(Path(path)), split=split, streaming=stream, **extra)
    except Exception as problem:  # datasets raises many types, also for a file without rows, and its parsers raise more
        raise ValueError(f"{path!r} holds no rows, or cannot be read: {problem!r}") from problem


def _checked(name: str, rows: Any, columns: Sequence[str]) -> Any:
    """The rows, if there are any and they have the columns; those that hold the bytes of files become images.

    Raises:
        ValueError: they cannot be read, are empty, or lack a column.
    """
    try:
        there = column_names(rows)
        empty = not (len(rows) if isinstance(rows, Dataset) else next(iter(rows), None))
    except Exception as problem:  # a stream is read here for the first time
        raise ValueError(f"the {name} split holds no rows, or cannot be read: {problem!r}") from problem
    if there and (missing := [column for column in columns if column not in there]):
        raise ValueError(f"the {name} split has no column {missing[0]!r}; it has {', '.join(there)}.")
    if empty:
        raise ValueError(f"the {name} split is empty.")
    for column in columns:
        feature = (rows.features or {}).get(column)
        if isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}:
            rows = rows.cast_column(column, Image())
    return rows


def _check_numbers(name: str, labels: Sequence[Any]) -> None:
    """Refuse labels that no regression can be measured on."""
    for row, label in enumerate(labels):
        if not isinstance(label, (int, float)) or not math.isfinite(label):
            raise ValueError(f"row {row} of the {name} split has the label {label!r}; a regression takes numbers.")
    if len(set(labels)) < 2:
        raise ValueError(
            f"every row of the {name} split has the label {labels[0]!r}; there is nothing to compare. (GLUE's test "
            "splits have no public labels.)"
        )


def _numbers_of_classes(train: Dataset, test: Dataset, column: str) -> tuple[dict[Any, int], list[str]]:
    """The number from 0 of each label, and the names of the classes."""
    labels_of = {"training": list(train[column]), "held-out": list(test[column])}
    for name, labels in labels_of.items():
        if None in labels:
            raise ValueError(f"row {labels.index(None)} of the {name} split has no label; leave such rows out.")
    feature = train.features[column]
    if isinstance(feature, ClassLabel):
        classes = list(feature.names)
        numbers: dict[Any, int] = {index: index for index in range(len(classes))}
    else:
        ordered = sorted(set(labels_of["training"]), key=lambda label: (type(label).__name__, label))
        numbers = {label: index for index, label in enumerate(ordered)}
        classes = list(map(str, ordered))
    if len(classes) < 2:
        raise ValueError(f"column {column!r} has a single class, {classes}; there is nothing to learn.")
    for name, labels in labels_of.items():
        for row, label in enumerate(labels):
            if label not in numbers:
                secret = " (the labels of this split are not public)" if label == MISSING else ""
                raise ValueError(
                    f"row {row} of the {name} split has the unknown label {label!r}{secret}; "
                    f"known: {', '.join(classes)}."
                )
    return numbers, classes
