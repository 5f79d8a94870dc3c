"""What is wrong with the data is said in one sentence before any training."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
from datasets import ClassLabel, Dataset, Features, Image, IterableDataset, Value, load_dataset

from hf_attn_swap.training import ImageDataArguments, TextDataArguments, load_rows, load_splits
from hf_attn_swap.training import data as data_module
from hf_attn_swap.training.data import filled_rows, inputs_of, open_rows

from .conftest import write_rows


@pytest.fixture(autouse=True)
def streams_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """datasets waits for the threads of a stream that is not read to its end: 5 seconds each time."""
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0.2, raising=False)


def files(tmp_path: Path, **changes: Any) -> TextDataArguments:
    train, test = write_rows(tmp_path / "a.csv", 8, 1), write_rows(tmp_path / "b.csv", 6, 2)
    return TextDataArguments(**{"train_file": str(train), "test_file": str(test), **changes})


def test_splits_and_classes(tmp_path: Path) -> None:
    train, test, classes = load_splits(files(tmp_path, max_train_samples=5, max_eval_samples=4))
    assert (len(train), len(test), classes) == (5, 4, ["0", "1"])
    assert set(train["labels"]) | set(test["labels"]) == {0, 1}
    again, _, _ = load_splits(files(tmp_path, max_train_samples=5, max_eval_samples=4))
    assert again["text"] == train["text"]


def test_names_of_classes_keep_their_order(tmp_path: Path) -> None:
    features = Features({"text": Value("string"), "label": ClassLabel(names=["sad", "glad"])})
    for split in ("train", "test"):
        rows = Dataset.from_dict({"text": ["x", "y"], "label": [1, 0]}, features=features)
        rows.to_parquet(tmp_path / f"{split}.parquet")
    train, _, classes = load_splits(TextDataArguments(dataset_name=str(tmp_path)))
    assert classes == ["sad", "glad"]
    assert train["labels"][:] == [1, 0]


def test_plain_text_needs_no_labels(tmp_path: Path) -> None:
    train, _, classes = load_splits(files(tmp_path, label_column_name="nothing"), labelled=False)
    assert (len(train), classes) == (8, [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_column_names": ["body"]}, "no column 'body'; it has text, label"),
        ({"label_column_name": "stars"}, "no column 'stars'"),
        ({"max_train_samples": 100}, "max_train_samples is 100, but the training split has 8 rows"),
        ({"train_file": "nowhere.csv"}, "there is no file 'nowhere.csv'"),
        ({"train_file": __file__}, "must end in .csv"),
    ],
)
def test_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_splits(files(tmp_path, **changes))


@pytest.mark.parametrize(("name", "content"), [("none.csv", "text,label\n"), ("empty.txt", "")])
def test_a_file_without_rows(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=re.escape(name)):
        load_splits(files(tmp_path, test_file=str(tmp_path / name)))


def test_an_unknown_label(tmp_path: Path) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_text("text,label\nx,0\ny,7\n")
    with pytest.raises(ValueError, match=r"row 1 of the held-out split has the unknown label 7; known: 0, 1"):
        load_splits(files(tmp_path, test_file=str(odd)))


def test_a_missing_split_and_folder(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", 4, 1)
    with pytest.raises(ValueError, match="test"):
        load_splits(TextDataArguments(dataset_name=str(tmp_path)))
    with pytest.raises(ValueError, match="there is no folder"):
        load_splits(TextDataArguments(dataset_name=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "name the data"),
        ({"dataset_name": "x", "train_file": "y"}, "name the data"),
        ({"train_file": "y"}, "go together"),
        ({"dataset_name": "x", "max_seq_length": 0}, "max_seq_length must be at least 1"),
    ],
)
def test_arguments_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TextDataArguments(**arguments)


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    with pytest.raises(ValueError, match="there is no file"):
        load_rows("data/ETTh1.csv", None, None, "date")


def test_a_folder_may_be_called_like_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "rows.parquet"  # as Spark writes
    folder.mkdir()
    Dataset.from_dict({"text": ["a", "b"]}).to_parquet(str(folder / "part-0.parquet"))
    assert load_rows(str(folder), None, "train", "text")["text"][:] == ["a", "b"]


def test_the_usual_split(tmp_path: Path) -> None:
    """Without a name, the first of the usual splits that is there; else the first that is there."""
    for split in ("test", "train", "more"):
        Dataset.from_dict({"text": [split]}).to_parquet(str(tmp_path / f"{split}.parquet"))
    assert load_rows(str(tmp_path), None, None, "text")["text"][:] == ["test"]
    assert load_rows(str(tmp_path), None, None, "text", ("train",))["text"][:] == ["train"]
    (tmp_path / "train.parquet").unlink()
    (tmp_path / "more.parquet").unlink()
    assert load_rows(str(tmp_path), None, None, "text", ("train",))["text"][:] == ["test"]


# -- Paths, parts of a split, and streams ------------------------------------------------------------------------------


def test_a_path_is_never_a_pattern(tmp_path: Path) -> None:
    """As a pattern, "a [1].txt" is the other file."""
    for name in ("a 1.txt", "a [1].txt", "b*.txt", "bb.txt", "c?.txt", "cc.txt"):
        (tmp_path / name).write_text(f"{name}\n")
    for name in ("a [1].txt", "b*.txt", "c?.txt"):
        for stream in (False, True):
            result = open_rows(str(tmp_path / name), None, None, "text", stream=stream)
            assert [row["text"] for row in result] == [name]


def hundred(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(100)))
    return path


def test_a_part_of_a_split(tmp_path: Path) -> None:
    path = hundred(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(path.read_text())
    for source in (path, folder):
        assert load_rows(str(source), None, "train[:10%]", "text")["text"][:] == [
            f"row {number}" for number in range(10)
        ]
        assert len(open_rows(str(source), None, "train[90:]", "text", in_order=True)) == 10  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="is a part of a split"):
            open_rows(str(source), None, "train[:10%]", "text", stream=True)
    with pytest.raises(ValueError, match="cannot be read"):
        load_rows(str(folder), None, "more[:10%]", "text")


def test_a_stream_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are read as ever; large ones as a stream, among whose rows it is shuffled, always in the same way."""
    path = str(hundred(tmp_path))
    assert isinstance(open_rows(path, None, None, "text"), Dataset)
    first = open_rows(path, None, None, "text", in_order=True)
    assert isinstance(first, IterableDataset)
    assert [row["text"] for row in first.take(3)] == ["row 0", "row 1", "row 2"]
    monkeypatch.setattr(data_module, "LARGE", 1000)
    shuffled = [inputs_of(open_rows(path, None, None, "text"), ["text"]) for _ in range(2)]
    assert list(shuffled[0]) == list(shuffled[1])
    assert list(shuffled[0]) != sorted(shuffled[0]) == sorted(f"row {number}" for number in range(100))
    (tmp_path / "lines.txt").write_text("".join(f"line {number}\n" for number in range(100, 300)))
    lines = inputs_of(open_rows(str(tmp_path / "lines.txt"), None, None, "text"), ["text"])
    assert list(lines) == [f"line {number}" for number in range(100, 300)], "lines of one text"
    assert isinstance(open_rows(path, None, None, "text", stream=False), Dataset)
    folder = tmp_path / "folder" / "data"  # as large as its files together
    folder.mkdir(parents=True)
    for part in ("train-0.jsonl", "train-1.jsonl"):
        (folder / part).write_text("".join(f'{{"text": "row {number}"}}\n' for number in range(40)))
    assert isinstance(open_rows(str(folder.parent), None, None, "text"), IterableDataset)
    monkeypatch.setattr(data_module, "LARGE", 10_000)
    assert isinstance(open_rows(str(folder.parent), None, None, "text"), Dataset)


@pytest.mark.parametrize(("size", "streams"), [(1000, False), (10**9, True), (None, True)])
def test_a_large_set_on_the_hub_is_a_stream(
    size: int | None, streams: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So is one whose size the Hub does not say."""
    path = str(hundred(tmp_path))
    info = SimpleNamespace(info=SimpleNamespace(download_size=size))
    monkeypatch.setattr(data_module, "load_dataset_builder", lambda *_: info)

    def load(source: str, config: str | None, streaming: bool = False) -> Any:
        assert source == "me/set"
        return load_dataset("json", data_files={"train": path}, streaming=streaming)

    monkeypatch.setattr(data_module, "load_dataset", load)
    assert isinstance(open_rows("me/set", None, None, "text"), IterableDataset) == streams
    with pytest.raises(ValueError, match="test"):
        open_rows("me/set", None, "test", "text")


@pytest.mark.parametrize("stream", [False, True])
def test_values_of_rows(stream: bool, tmp_path: Path) -> None:
    """Pairs, labels, images, and rows with a blank."""
    values = [{"one": one, "other": other, "label": place} for place, (one, other) in enumerate(("ab", " c", "de"))]
    Dataset.from_list(values).to_parquet(str(tmp_path / "rows.parquet"))
    rows = open_rows(str(tmp_path / "rows.parquet"), None, None, ["one", "other"], stream=stream, in_order=True)
    assert list(filled_rows(rows, ["one", "other"], "label")) == [(("a", "b"), 0), (("d", "e"), 2)]
    assert list(filled_rows(rows, ["one"])) == ["a", "d"]
    assert list(inputs_of(rows, ["one", "other"])) == [("a", "b"), (" ", "c"), ("d", "e")]
    with pytest.raises(ValueError, match="every row of column 'one' is blank"):
        list(filled_rows(rows.filter(lambda row: row["one"] == " "), ["one"]))
    features = Features({"image": Image(), "label": ClassLabel(names=["dark", "light"])})
    pictures = {"image": [PIL.Image.new("RGB", (3, 2), (shade, 0, 0)) for shade in (7, 9)], "label": [0, 1]}
    Dataset.from_dict(pictures, features=features).to_parquet(str(tmp_path / "train.parquet"))
    pictures_file = str(tmp_path / "train.parquet")
    result = inputs_of(open_rows(pictures_file, None, "train", "image", stream=stream, in_order=True), ["image"])
    assert [image.convert("RGB").getpixel((0, 0))[0] for image in result] == [7, 9]


@pytest.mark.parametrize("binary", [pyarrow.binary(), pyarrow.large_binary()], ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_images_as_bytes_without_the_metadata_of_datasets(stream: bool, binary: Any, tmp_path: Path) -> None:
    """As pandas and pyarrow write a column of `{bytes, path}`."""
    path, files = str(tmp_path / "rows.parquet"), []
    for shade in (7, 9):
        PIL.Image.new("RGB", (3, 2), (shade, 0, 0)).save(file := io.BytesIO(), "png")
        files.append({"bytes": file.getvalue(), "path": None})
    column = pyarrow.array(files, pyarrow.struct({"bytes": binary, "path": pyarrow.string()}))
    pyarrow.parquet.write_table(pyarrow.table({"image": column, "label": [0, 1]}), path)
    result = inputs_of(open_rows(path, None, None, "image", stream=stream, in_order=True), ["image"])
    assert [image.convert("RGB").getpixel((0, 0))[0] for image in result] == [7, 9]
    for split in load_splits(ImageDataArguments(train_file=path, test_file=path))[:2]:
        assert sorted(row["image"].convert("RGB").getpixel((0, 0))[0] for row in split) == [7, 9]


@pytest.mark.parametrize(
    ("labels", "message"),
    [("one\n2\n", "one"), ("-1\n-1\n", "same label")],
)
def test_labels_of_a_regression(labels: str, message: str, tmp_path: Path) -> None:
    whole = write_rows(tmp_path / "a.csv", 4, 1)
    (tmp_path / "odd.csv").write_text("label,text\n" + "".join(f"{label},x\n" for label in labels.split("\n")[:2]))
    data = files(tmp_path, train_file=str(whole), test_file=str(tmp_path / "odd.csv"))
    with pytest.raises(ValueError, match=message):
        load_splits(data, regression=True)
    train, _, classes = load_splits(files(tmp_path), regression=True)
    assert (sorted(set(train["labels"])), classes) == ([0.0, 1.0], [])
