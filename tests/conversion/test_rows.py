"""Texts, images and ready rows become rows of a model; labels and other columns never come near the model."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

import pandas
import pytest
import torch
from PIL import Image

from hf_attn_swap.conversion.rows import as_rows
from tests.contract.harness import refused

from .converting import stock
from .letters import Words
from .pixels import Pixels


def test_texts_of_a_language_model_are_joined_and_cut() -> None:
    words = Words()
    words.pad_token = None
    found = as_rows(stock("llama"), ["abcdefg", "", "  ", "hijkl"], words, length=5)
    assert [row["input_ids"] for row in found.rows] == [words(part)["input_ids"] for part in ("abcde", "fghij")]
    assert (len(found), found.length, found.unit) == (2, 5, "tokens")
    assert words.pad_token is None, "the tokenizer of the caller"


def test_texts_of_another_model_are_a_row_each() -> None:
    found = as_rows(stock("bert"), [None, "abcdefg", "ab", " "], Words(), length=5)
    assert (len(found), found.length) == (2, 3.5)
    (batch,) = found.batches(8)
    assert batch["input_ids"].shape == (2, 5)
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]], "those of like length together"


def test_pairs_of_texts_are_a_row_each() -> None:
    words = Words()
    found = as_rows(stock("bert"), [(None, "h"), ("ab", "cd"), ["e", "f"], ("g", " ")], words, length=3)
    assert [row["input_ids"] for row in found.rows] == [words(text)["input_ids"] for text in ("abc", "ef")]


def test_a_training_reads_rows_of_like_length_together() -> None:
    """Nearly no padding, all rows once, batches in a random order, and the same order again."""
    lengths = torch.randint(1, 60, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    found = as_rows(stock("bert"), ["a" * length for length in lengths], Words(), length=60)
    picked = torch.randperm(1000, generator=torch.Generator().manual_seed(0)).tolist()

    def longest(order: list[int]) -> list[int]:
        return [max(lengths[index] for index in order[start : start + 4]) for start in range(0, len(order), 4)]

    order = list(itertools.islice(found.order(4), 1000))
    assert sorted(order) == list(range(1000))
    assert order == list(itertools.islice(found.order(4), 1000))
    real = sum(lengths)
    assert 4 * sum(longest(order)) < 1.1 * real < 1.4 * real < 4 * sum(longest(picked))
    firsts = longest(order)[:50]
    assert firsts != sorted(firsts)
    assert firsts != sorted(firsts, reverse=True)


def test_all_rows_are_read_before_any_is_read_again() -> None:
    """An epoch that ends within a batch leaves the batches of the next epoch as they are: rows of like length."""
    lengths = list(range(1, 11))
    found = as_rows(stock("bert"), ["a" * length for length in lengths], Words(), length=60)
    order = list(itertools.islice(found.order(4), 40))
    for start in range(0, 40, 10):
        assert sorted(order[start : start + 10]) == list(range(10))
    batches = [sorted(order[start : start + 4]) for start in range(0, 40, 4)]
    for first, second in ((0, 1), (3, 4), (5, 6), (8, 9)):  # batches 2 and 7 have rows of two epochs
        shorter, longer = sorted((batches[first], batches[second]))
        assert shorter[-1] < longer[0]


def test_images_are_read_when_a_batch_needs_them() -> None:
    """A data set of images can be larger than the memory."""
    found: list[int] = []

    class Noted(Pixels):
        def __call__(self, image: Image.Image, return_tensors: str) -> dict[str, torch.Tensor]:
            found.append(image.size[0])
            return super().__call__(image, return_tensors)

    prepared = as_rows(stock("vit"), [Image.new("RGB", (size, 4)) for size in range(1, 2001)], Noted())
    assert len(found) < 400, "a sample"
    found.clear()
    assert len(list(prepared.some([5, 7]).batches(2))) == 1
    assert found == [6, 8]


def test_images() -> None:
    images = [Image.new("L", (size, 4)) for size in (5, 6)]
    found = as_rows(stock("vit"), images, Pixels())
    (batch,) = found.batches(2)
    assert batch["pixel_values"].shape == (2, 3, 16, 16)
    assert batch["pixel_values"][1, 0, 0, 0] == 6
    assert (found.length, found.unit) == (4, "patches"), "16 pixels in patches of 8, in two directions"


def test_a_column_of_pandas() -> None:
    """It counts by its index, which may lack numbers, as after a filter."""
    column = pandas.Series(["ab", "cd"])
    for data in (column, column.to_frame("text")):
        with refused(f"got {type(data).__name__}", "data.tolist()"):
            as_rows(stock("bert"), data, Words())


def test_rows_of_unequal_length_are_padded_wherever_they_lie() -> None:
    """A sample of the rows may have one length, and the rows between them another."""
    data = [{"input_ids": [4] * (5 if place == 1 else 3)} for place in range(600)]
    found = as_rows(stock("bert"), data, Words())
    assert found.collate(data[:1])["input_ids"].shape == (1, 3)
    assert found.collate(data[:3])["input_ids"].shape == (3, 5)
    with refused("the rows have different lengths; pass the tokenizer"):
        as_rows(stock("bert"), data).collate(data[:3])


def test_a_row_that_is_no_image_is_found_before_the_training() -> None:
    images = [Image.new("RGB", (4, 4))] * 1000
    images[501:502] = [None]
    with refused("row 501 is no image, as other rows are, but None."):
        as_rows(stock("vit"), images, Pixels())


@pytest.mark.parametrize("label", [math.nan, "no", [1, 2, 3], None, -1, True, torch.ones(2)])
def test_a_label_that_is_no_class_is_left_out(label: Any) -> None:
    data = [
        {"input_ids": [4, 5], "labels": 1, "text": "a", "idx": 3},
        {"input_ids": [4, 5], "labels": label, "text": "b"},
    ]
    found = as_rows(stock("bert"), data)
    assert list(found.collate(data)) == ["input_ids"]
    assert found.collate(data[:1])["labels"].tolist() == [1]


def generated() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("name", "data", "processor", "reason"),
    [
        ("bert", "a text", None, "data must be a sequence of texts, images or rows that are ready, got str"),
        ("bert", {"input_ids": [1]}, None, "got dict"),
        ("bert", generated(), None, "got generator"),
        ("bert", [], None, "there are no rows to convert on"),
        ("bert", [3], None, "a row must be a text, a pair of texts, an image or a mapping, got int"),
        ("bert", [{"text": "a"}], None, "BertForMaskedLM takes input_ids, but the rows have text"),
        ("bert", [{"input_ids": [1]}, {"input_ids": [1, 2]}], None, "the rows have different lengths"),
        ("vit", ["a"], Words(), "ViTForImageClassification takes pixel_values, but the data are texts"),
        ("bert", ["a"], None, "texts need a tokenizer"),
        ("bert", [" ", ""], Words(), "every text is blank"),
        ("bert", [("a", "b", "c")], Words(), "an image or a mapping, got tuple"),
        ("bert", [(" ", "a")], Words(), "every text is blank"),
        ("bert", [("a", "b"), ("c", "d", "e")], Words(), "row 1 is no pair of texts, as other rows are, but ('c', "),
        ("bert", [("a", "b"), "c"], Words(), "row 1 is no pair of texts, as other rows are, but 'c'"),
        ("bert", ["a", ("b", "c")], Words(), "row 1 is no text, as other rows are, but ('b', 'c')"),
        ("bert", [None, None], Words(), "every text is blank"),
        ("bert", ["a", 3], Words(), "row 1 is no text, as other rows are, but 3"),
        ("llama", [("ab", "cd")], Words(), "pairs of texts are for a classifier of two texts"),
        ("llama", ["abcdefg"], Words(), "the texts have 7 tokens, less than two blocks of 5"),
        ("bert", [Image.new("RGB", (4, 4))], Pixels(), "BertForMaskedLM takes input_ids, but the data are images"),
        ("vit", [Image.new("RGB", (4, 4)), 3], Pixels(), "row 1 is no image, as other rows are, but 3"),
        ("vit", [Image.new("RGB", (4, 4))], None, "images need an image processor"),
    ],
)
def test_data_that_do_not_fit_end_in_one_line(name: str, data: Any, processor: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)) as caught:
        as_rows(stock(name), data, processor, length=5)
    assert "\n" not in str(caught.value)
