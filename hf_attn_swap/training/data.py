"""Reads the rows to train and to measure on, and checks them before anything is trained."""

from __future__ import annotations

import glob
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
USUAL = ("test", "validation")  # the splits of held-out rows


def load_splits(
    data: DataArguments, *, labelled: bool = True, regression: bool = False
) -> tuple[Dataset, Dataset, list[str]]:
    """The training sample, the held-out rows, and the names of the classes (none for plain text and a regression).

    Labels become numbers from 0. Their order is the order of the set's own class names, or the sorted order if the set
    names no classes. The labels of a regression stay the numbers that they are.

    Raises:
        ValueError: a path, split or column does not exist, a split is empty, a held-out row has a class that the
            training split lacks, or there is one class or number alone.
    """
    columns = [*data.input_columns, *([data.label_column_name] if labelled else [])]
    if data.dataset_name is None:
        train, test = (load_rows(str(file), None, None, columns) for file in (data.train_file, data.test_file))
    else:
        names = data.train_split_name, data.test_split_name
        train, test = (load_rows(data.dataset_name, data.dataset_config_name, name, columns) for name in names)
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
    labels = {"training": list(train[data.label_column_name]), "held-out": list(test[data.label_column_name])}
    number_of: Callable[[Any], float] = float
    classes: list[str] = []
    if not regression:
        numbers, classes = _numbers_of_classes(train.features[data.label_column_name], labels)
        number_of = numbers.__getitem__
    elif any(len(set(values)) < 2 for values in labels.values()):  # GLUE's test splits have no public labels
        raise ValueError(f"every row of a split has the same {data.label_column_name}; there is nothing to compare.")
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
            `usual`, and the whole of a file.
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
    is_file = path.is_file() or (path.suffix in READERS and not path.is_dir())
    if is_file and not path.is_file():
        raise ValueError(f"there is no file {source!r}.")
    if stream is None:
        stream = (in_order and not sliced and is_file and path.suffix in CLOSED) or _is_large(source, config)
    if sliced and stream:
        raise ValueError(
            f"{split!r} is a part of a split, which a stream does not have; name the whole split, of which no more is "
            "read than is needed, or read no stream (--no-stream)."
        )
    if is_file:
        rows = _load_file(path, split or "train", stream=stream)
    elif split is not None:
        rows = _call(source, load_dataset, source, config, split=split, streaming=stream)
    else:
        splits = _call(source, load_dataset, source, config, streaming=stream)
        rows = splits[next(name for name in (*usual, *map(str, splits)) if name in splits)]
    rows = _checked(source, rows, [column] if isinstance(column, str) else list(column))
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
        for row in self.rows.select_columns(list(self.columns)):
            yield _value(row, self.columns)


def _value(row: dict[str, Any], columns: Sequence[str]) -> Any:
    """The value of one column, or the values of several."""
    values = tuple(row[name] for name in columns)
    return values[0] if len(values) == 1 else values


def _is_large(source: str, config: str | None) -> bool:
    """True if the data are large, or of a size that is not known."""
    path = Path(source)
    if path.exists():
        return sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file()) > LARGE
    size = _call(source, load_dataset_builder, source, config).info.download_size
    return size is None or size > LARGE


def _load_file(path: Path, split: str, *, stream: bool) -> Any:
    if path.suffix not in READERS:
        raise ValueError(f"{str(path)!r}: the file must end in {', '.join(READERS)}.")
    options = {"delimiter": "\t"} if path.suffix == ".tsv" else {}
    pattern = glob.escape(str(path.resolve()))
    return _call(
        str(path), load_dataset, READERS[path.suffix], data_files=pattern, split=split, streaming=stream, **options
    )


def _call(source: str, load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function of `datasets`.

    Raises:
        ValueError: there is no such folder, or the data cannot be read.
    """
    if source.startswith((".", "/", "~")) and not Path(source).exists():
        raise ValueError(f"there is no folder {source!r}.")
    try:
        return load(*arguments, **options)
    except Exception as problem:  # datasets raises a dozen types: not found, no files, no such split or configuration
        raise ValueError(f"the data {source!r} cannot be read: {problem}") from problem


def _checked(source: str, rows: Any, columns: Sequence[str]) -> Any:
    """The rows, if there are any and they have the columns; those that hold the bytes of files become images.

    Raises:
        ValueError: they cannot be read, are empty, or lack a column.
    """
    try:
        there = column_names(rows)
        empty = not (len(rows) if isinstance(rows, Dataset) else next(iter(rows), None))
    except Exception as problem:  # a stream is read here for the first time
        raise ValueError(f"{source!r} holds no rows, or cannot be read: {problem!r}") from problem
    if there and (missing := [column for column in columns if column not in there]):
        raise ValueError(f"{source!r} has no column {missing[0]!r}; it has {', '.join(there)}.")
    if empty:
        raise ValueError(f"{source!r} holds no rows.")
    for column in columns:
        feature = (rows.features or {}).get(column)
        if isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}:
            rows = rows.cast_column(column, Image())
    return rows


def _numbers_of_classes(feature: Any, labels: dict[str, list[Any]]) -> tuple[dict[Any, int], list[str]]:
    """The number from 0 of each label, and the names of the classes."""
    if isinstance(feature, ClassLabel):
        classes = list(feature.names)
        numbers: dict[Any, int] = {index: index for index in range(len(classes))}
    else:
        ordered = sorted(set(labels["training"]) - {None}, key=lambda label: (type(label).__name__, label))
        numbers = {label: index for index, label in enumerate(ordered)}
        classes = list(map(str, ordered))
    if len(classes) < 2:
        raise ValueError(f"there is a single class, {classes}, and nothing to learn.")
    for name, values in labels.items():
        for row, label in enumerate(values):
            if label not in numbers:  # -1, where the labels of a split are not public
                raise ValueError(
                    f"row {row} of the {name} split has the unknown label {label!r}; known: {', '.join(classes)}."
                )
    return numbers, classes
