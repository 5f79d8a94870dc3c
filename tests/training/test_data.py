"""What is wrong with the data is said in one sentence before any training."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, Features, Value

from hf_attn_swap.training import TextDataArguments, load_rows, load_splits

from .conftest import write_rows


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
        ({"text_column_names": ["body"]}, "the training split has no column 'body'; it has text, label"),
        ({"label_column_name": "stars"}, "no column 'stars'"),
        ({"max_train_samples": 100}, "max_train_samples is 100, but the training split has 8 rows"),
        ({"train_file": "nowhere.csv"}, "there is no file 'nowhere.csv'"),
        ({"train_file": __file__}, "must end in .csv"),
    ],
)
def test_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        load_splits(files(tmp_path, **changes))


@pytest.mark.parametrize(
    ("name", "content"), [("none.csv", "text,label\n"), ("empty.csv", ""), ("empty.jsonl", ""), ("empty.txt", "")]
)
def test_a_file_without_rows(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{re.escape(name)}' holds no rows, or cannot be read: \w+"):
        load_splits(files(tmp_path, test_file=str(tmp_path / name)))


def test_an_unknown_label(tmp_path: Path) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_text("text,label\nx,0\ny,7\n")
    with pytest.raises(ValueError, match=r"row 1 of the held-out split has the unknown label 7; known: 0, 1"):
        load_splits(files(tmp_path, test_file=str(odd)))


def test_a_row_without_a_label(tmp_path: Path) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_text("text,label\nx,a\ny,\nz,b\n")
    with pytest.raises(ValueError, match="row 1 of the training split has no label; leave such rows out"):
        load_splits(files(tmp_path, train_file=str(odd)))


def test_labels_that_are_not_public(tmp_path: Path) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_text("text,label\nx,-1\ny,-1\n")
    with pytest.raises(ValueError, match="the labels of this split are not public"):
        load_splits(files(tmp_path, test_file=str(odd)))


def test_a_single_class(tmp_path: Path) -> None:
    odd = tmp_path / "odd.csv"
    odd.write_text("text,label\nx,3\ny,3\n")
    with pytest.raises(ValueError, match="a single class"):
        load_splits(files(tmp_path, train_file=str(odd)))


def test_a_missing_split_and_folder(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.csv", 4, 1)
    with pytest.raises(ValueError, match="has no split 'test'; it has train"):
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
    with pytest.raises(ValueError, match=r"there is no file 'data/ETTh1\.csv'"):
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
