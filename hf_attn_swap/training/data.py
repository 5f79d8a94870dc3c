"""Reads the rows to train and to measure on, and checks them before anything is trained."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Image,
    IterableDataset,
    IterableDatasetDict,
    load_dataset,
    load_dataset_builder,
)

from ..conversion.rows import is_blank
from .arguments import DataArguments

READERS = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".txt": "text"}
CLOSED = (".json", ".jsonl", ".parquet", ".txt")  # files that are closed after a part of them was read as a stream
LARGE = 500_000_000  # bytes: larger data are read as a stream
BUFFER = 1000  # rows among which a stream is shuffled
Rows = TypeVar("Rows", Dataset, IterableDataset)
MISSING = -1  # the label of a row whose true label is not public, in test splits on the Hub


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
    train, test = _first_rows(data) if data.streaming else _read(data)
    for name, split in (("training", train), ("held-out", test)):
        _check(name, split, [*data.input_columns, *([data.label_column_name] if labelled else [])])
    train, test = (_with_images(split, data.input_columns) for split in (train, test))
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
        return _scored("training", train, data.label_column_name), _scored("held-out", test, data.label_column_name), []
    return _number(train, test, data.label_column_name)


def load_rows(
    source: str,
    config: str | None,
    split: str | None,
    column: str | Sequence[str],
    usual: Sequence[str] = ("test", "validation"),
) -> Dataset:
    """The rows of one split of a set on the Hub, a folder or a file. If no split is named, the first of `usual`.

    The split must have the column, or all of the columns. A name such as "train[:10%]" is a part of a split, as
    `datasets` reads it.

    Raises:
        ValueError: a path, split or column does not exist, or there are no rows.
    """
    return cast(Dataset, _rows(source, config, split, column, usual, stream=False))


def open_rows(
    source: str,
    config: str | None,
    split: str | None,
    column: str | Sequence[str],
    usual: Sequence[str] = ("test", "validation"),
    *,
    stream: bool | None = None,
    in_order: bool = False,
) -> Dataset | IterableDataset:
    """The rows as `load_rows` gives them, or a stream of them.

    Args:
        source: a set on the Hub, a folder or a file.
        config: the configuration of the set.
        split: the split; None takes the first of `usual`.
        column: the column, or the columns, that the split must have.
        usual: the splits that are looked for.
        stream: True reads a stream. None does so if the data are larger than 500 MB, or if the Hub does not say how
            large they are.
        in_order: the first rows alone will be read; a file is then a stream also if it is small, except a table of CSV.
            Otherwise a stream of a set is shuffled among 1,000 rows, always in the same way; the lines of a text file
            keep their order.

    Raises:
        ValueError: as `load_rows`; or a stream is asked for a part of a split.
    """
    if stream is None:
        part = split is not None and "[" in split
        first = in_order and not part and Path(source).is_file() and Path(source).suffix in CLOSED
        stream = first or _is_large(source, config)
    found = _rows(source, config, split, column, usual, stream=stream)
    if isinstance(found, IterableDataset) and not in_order and Path(source).suffix != ".txt":
        return found.shuffle(seed=0, buffer_size=BUFFER)
    return found


def column_names(rows: Dataset | IterableDataset) -> list[str]:
    """The names of the columns; of a stream, those of its first row, if it does not name them."""
    return list(rows.column_names or next(iter(rows), {}))


def filled_rows(rows: Dataset | IterableDataset, columns: Sequence[str], label: str | None = None) -> Iterator[Any]:
    """The values of the columns, row by row, without rows in which one of them is missing or a blank text.

    A row of one column is its value; of two, a pair. With `label`, each comes with the value of this column.

    Raises:
        ValueError: no row is left.
    """
    wanted = list(dict.fromkeys([*columns, *([] if label is None else [label])]))
    blank = True
    for row in rows.select_columns(wanted):
        values = tuple(row[name] for name in columns)
        if not any(map(is_blank, values)):
            blank, value = False, values[0] if len(values) == 1 else values
            yield value if label is None else (value, row[label])
    if blank:
        raise ValueError(f"every row of column {' or '.join(map(repr, columns))} is blank.")


def inputs_of(rows: Dataset | IterableDataset, columns: Sequence[str]) -> Any:
    """What the rows hold for a model: the texts or images of one column, or the pairs of texts of two columns.

    They are read when they are used: a sequence, or a stream.
    """
    if isinstance(rows, IterableDataset):
        return _Stream(rows, tuple(columns))
    return rows[columns[0]] if len(columns) == 1 else _Pairs(rows.select_columns(list(columns)), tuple(columns))


@dataclass(frozen=True)
class _Pairs:
    """The pairs of texts of two columns."""

    rows: Dataset
    columns: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        row = self.rows[index]
        return tuple(row[name] for name in self.columns)

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (tuple(row[name] for name in self.columns) for row in self.rows)


@dataclass(frozen=True)
class _Stream:
    """The texts, images or pairs of texts of a stream."""

    rows: IterableDataset
    columns: tuple[str, ...]

    def __iter__(self) -> Iterator[Any]:
        pictures = {name: each for name, each in (self.rows.features or {}).items() if isinstance(each, Image)}
        for row in _undecoded(self.rows).select_columns(list(self.columns)):
            values = tuple(
                _Picture(row[name], pictures[name]) if name in pictures and row[name] is not None else row[name]
                for name in self.columns
            )
            yield values[0] if len(values) == 1 else values


@dataclass(frozen=True)
class _Picture:
    """An image as the bytes of its file, which take less memory than its pixels."""

    file: dict[str, Any]
    column: Image

    def convert(self, mode: str) -> Any:
        """The image, decoded as its column says."""
        return self.column.decode_example(self.file).convert(mode)


def _read(data: DataArguments) -> tuple[Dataset, Dataset]:
    if data.dataset_name is None:
        assert data.train_file is not None
        assert data.test_file is not None
        return _file(data.train_file), _file(data.test_file)
    found = _splits(data.dataset_name, data.dataset_config_name)
    return _split(data.dataset_name, found, data.train_split_name), _split(
        data.dataset_name, found, data.test_split_name
    )


def _rows(
    source: str,
    config: str | None,
    split: str | None,
    column: str | Sequence[str],
    usual: Sequence[str],
    *,
    stream: bool,
) -> Dataset | IterableDataset:
    part = split is not None and "[" in split
    if part and stream:
        raise ValueError(
            f"{split!r} is a part of a split, which a stream does not have; name the whole split, of which no more is "
            "read than is needed, or read no stream (--no-stream)."
        )
    if Path(source).is_file() or (Path(source).suffix in READERS and not Path(source).is_dir()):
        rows = _file(source, split or "train", stream=stream)
    elif part:
        rows = _loaded(source, config, split=split)
    else:
        found = _splits(source, config, stream=stream)
        there = [name for name in (*usual, *map(str, found)) if name in found]
        rows = _split(source, found, split or there[0])
    columns = [column] if isinstance(column, str) else list(column)
    _check("chosen", rows, columns)
    return _with_images(rows, columns)


def _is_large(source: str, config: str | None) -> bool:
    """True if the data are large, or of a size that is not known."""
    path = Path(source)
    if path.is_file():
        return path.stat().st_size > LARGE
    if path.is_dir():
        return sum(each.stat().st_size for each in path.rglob("*") if each.is_file()) > LARGE
    if path.suffix in READERS:
        return False
    _check_folder(source)
    try:
        size = load_dataset_builder(source, config).info.download_size
    except Exception as problem:
        raise _unreadable(source, problem) from problem
    return size is None or size > LARGE


def _splits(source: str, config: str | None, *, stream: bool = False) -> Any:
    found = _loaded(source, config, streaming=stream)
    assert isinstance(found, (DatasetDict, IterableDatasetDict))
    return found


def _loaded(source: str, config: str | None, **how: Any) -> Any:
    _check_folder(source)
    try:
        return load_dataset(source, config, **how)
    except Exception as problem:  # datasets raises a dozen types: not found, no files, no such configuration
        raise _unreadable(source, problem) from problem


def _unreadable(source: str, problem: Exception) -> ValueError:
    return ValueError(f"the data set {source!r} cannot be read: {problem}")


def _check_folder(source: str) -> None:
    """Refuse a folder that is not there, and one that `datasets` would take for a pattern.

    Raises:
        ValueError: says which.
    """
    folder = Path(source)
    if source.startswith((".", "/", "~")) and not folder.is_dir():
        raise ValueError(f"there is no folder {source!r}.")
    if folder.is_dir() and _exactly(folder) != str(folder.resolve()):
        raise ValueError(
            f"the path {str(folder.resolve())!r} has one of the signs *, ? and [, which datasets takes for a pattern; "
            "rename the folder, or name a file."
        )


def _exactly(path: Path) -> str:
    """The pattern of this path alone."""
    return glob.escape(str(path.resolve()))


def _split(source: str, found: Any, name: str) -> Any:
    if name not in found:
        raise ValueError(f"{source!r} has no split {name!r}; it has {', '.join(map(str, found))}.")
    return found[name]


def _file(path: str, split: str = "train", *, stream: bool = False) -> Any:
    suffix = Path(path).suffix
    if not Path(path).is_file():
        raise ValueError(f"there is no file {path!r}.")
    if suffix not in READERS:
        raise ValueError(f"{path!r}: the file must end in {', '.join(READERS)}.")
    if split.partition("[")[0] != "train":
        raise ValueError(f"the file {path!r} has no split {split!r}; it is all of train.")
    extra: dict[str, Any] = {"delimiter": "\t"} if suffix == ".tsv" else {}
    try:
        return load_dataset(READERS[suffix], data_files=_exactly(Path(path)), split=split, streaming=stream, **extra)
    except Exception as problem:  # datasets raises many types, also for a file without rows, and its parsers raise more
        raise ValueError(f"{path!r} holds no rows, or cannot be read: {problem!r}") from problem


def _first_rows(data: DataArguments) -> tuple[Dataset, Dataset]:
    """The first rows of both splits, shuffled among some, as they come from a stream."""
    if data.dataset_name is None:
        assert data.train_file is not None
        assert data.test_file is not None
        both = _file(data.train_file, stream=True), _file(data.test_file, stream=True)
    else:
        found = _splits(data.dataset_name, data.dataset_config_name, stream=True)
        both = tuple(_split(data.dataset_name, found, name) for name in (data.train_split_name, data.test_split_name))
    return (
        _kept(both[0].shuffle(seed=0, buffer_size=BUFFER), data.max_train_samples),
        _kept(both[1], data.max_eval_samples),
    )


def _kept(rows: IterableDataset, count: int | None) -> Dataset:
    """The first rows of a stream as a `Dataset`."""
    assert count is not None
    return Dataset.from_list(list(_undecoded(rows).take(count)), features=rows.features)


def _undecoded(rows: IterableDataset) -> IterableDataset:
    """The rows with the bytes of their images' files, which take less memory than the pixels."""
    for name, feature in (rows.features or {}).items():
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
    return rows


def _check(name: str, split: Dataset | IterableDataset, columns: list[str]) -> None:
    try:
        there = column_names(split)
        empty = not (len(split) if isinstance(split, Dataset) else next(iter(split), None))
    except Exception as problem:  # a stream is read here for the first time
        raise ValueError(f"the {name} split holds no rows, or cannot be read: {problem!r}") from problem
    if there and (missing := [column for column in columns if column not in there]):
        raise ValueError(f"the {name} split has no column {missing[0]!r}; it has {', '.join(there)}.")
    if empty:
        raise ValueError(f"the {name} split is empty.")


def _with_images(rows: Rows, columns: Sequence[str]) -> Rows:
    """The rows with those columns as images that hold the bytes of files, as `datasets` itself writes images."""
    for name in columns:
        feature = (rows.features or {}).get(name)
        if isinstance(feature, dict) and "bytes" in feature and feature.keys() <= {"bytes", "path"}:
            rows = rows.cast_column(name, Image())
    return rows


def _scored(name: str, split: Dataset, column: str) -> Dataset:
    """The rows of a split with the numbers of a column as labels."""
    for row, value in enumerate(split[column]):
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"row {row} of the {name} split has the label {value!r}; a regression takes numbers.")
    if len(set(split[column])) < 2:
        raise ValueError(
            f"every row of the {name} split has the label {split[column][0]!r}; there is nothing to compare. (GLUE's "
            "test splits have no public labels.)"
        )
    return split.map(lambda row: {"labels": float(row[column])}, remove_columns=[column], desc="labels")


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
