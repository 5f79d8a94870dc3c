"""Turns what a user has (texts, images, or rows that are ready) into rows for a conversion, and rows into batches.

Axes: L token.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import PreTrainedModel, default_data_collator

from ..measuring.batches import LABELS, Batch, gives_numbers, is_label
from ..measuring.lost import predicts_next
from ..wiring.install import model_root

Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]
SAMPLE = 256  # rows whose length tells how long the rows are
WINDOW = 50  # batches whose rows are sorted by length
TOKENS, PATCHES, ROWS = "tokens", "patches", "rows"
UNEQUAL = "the rows have different lengths; pass the tokenizer as processor, which pads them."


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Rows as the model takes them.

    Attributes:
        rows: a sequence of mappings, without a batch axis.
        collate: makes a batch of some rows.
        length: the mean number of tokens of a row, or of patches of an image; 0 if the rows hold neither.
        unit: what `length` counts: "tokens", "patches" or, if it is 0, "rows".
        padded: True if rows have different lengths.
    """

    rows: Any
    collate: Collator
    length: float
    unit: str = TOKENS
    padded: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def some(self, indices: Sequence[int]) -> Rows:
        """Some of the rows."""
        return replace(self, rows=select(self.rows, indices))

    def longest(self) -> dict[str, Any]:
        """The longest of some rows."""
        if not self.padded:
            return dict(self.rows[0])
        return max((dict(self.rows[index]) for index in sample(len(self.rows))), key=_length)

    def batches(self, size: int) -> Iterator[Batch]:
        """All rows in batches, those of like length together so that there is little padding."""
        order = list(range(len(self.rows)))
        if self.padded:
            order.sort(key=lambda index: _length(self.rows[index]))
        for start in range(0, len(order), size):
            yield self.collate([dict(self.rows[index]) for index in order[start : start + size]])

    def order(self, size: int) -> Iterator[int]:
        """The numbers of the rows as a training reads them, without end; the order is random, and always the same.

        All rows are read before any is read again. A batch of `size` has rows of like length, so that there is little
        padding.
        """
        shuffled = torch.randperm(len(self), generator=torch.Generator().manual_seed(0)).tolist()
        for epoch in itertools.count():
            missing = -epoch * len(self) % size  # rows that the last batch of the epoch before still lacks
            yield from shuffled[:missing]
            yield from self._grouped(shuffled[missing:], size)

    def _grouped(self, indices: Sequence[int], size: int) -> Iterator[int]:
        """The same rows in another order: those of a batch have like lengths, and the batches are in random order."""
        if not self.padded:
            yield from indices
            return
        generator = torch.Generator().manual_seed(0)
        for start in range(0, len(indices), WINDOW * size):
            window = sorted(indices[start : start + WINDOW * size], key=lambda index: -_length(self.rows[index]))
            batches = [window[first : first + size] for first in range(0, len(window), size)]
            rest = [batches.pop()] if len(batches[-1]) < size else []
            order = torch.randperm(len(batches), generator=generator).tolist()
            yield from itertools.chain(*(batches[place] for place in order), *rest)


def sample(count: int) -> range:
    """The numbers of some rows, spread evenly over `count` rows."""
    return range(0, count, max(1, count // SAMPLE))


def ready_rows(rows: Any, collate: Collator) -> Rows:
    """The rows of a recipe, which has its own way to make batches of them. Their length is not counted."""
    return Rows(
        rows=rows, collate=collate, length=0, unit=ROWS, padded="input_ids" in getattr(rows, "column_names", ())
    )


def mean_length(rows: Any) -> float:
    """The mean number of tokens of some rows; 0 if they hold none."""
    return fmean(_length(rows[index]) for index in sample(len(rows)))


def select(rows: Any, indices: Sequence[int]) -> Any:
    """Some rows of a `Dataset`, or of any other sequence."""
    return rows.select(indices) if hasattr(rows, "select") else Subset(rows, list(indices))


def as_rows(model: nn.Module, data: Any, processor: Any = None, *, length: int = 512) -> Rows:
    """Prepare the data of a conversion.

    Args:
        model: the model that will take the rows.
        data: texts, pairs of texts (for a classifier of two texts), images (PIL), or rows that are ready: mappings with
            `input_ids` or `pixel_values`, without a batch axis, such as a tokenised `Dataset`.
        processor: the tokenizer or image processor; not needed for rows of one length that are ready.
        length: the number of tokens of a row. For a causal language model, the texts are joined and cut into blocks of
            this length; for other models, a longer text is cut.

    Raises:
        ValueError: there are no rows, the data are of another kind than the model takes, a processor is missing, or
            the text is shorter than two blocks.
    """
    root = model_root(model)
    if hasattr(data, "iloc") and hasattr(data, "tolist"):  # a column of pandas counts by its index, not by its place
        data = data.tolist()
    if (
        isinstance(data, (str, Mapping))
        or hasattr(data, "iloc")
        or not hasattr(data, "__len__")
        or not hasattr(data, "__getitem__")
    ):
        raise ValueError(
            f"data must be a sequence of texts, images or rows that are ready, got {type(data).__name__}; a file is "
            "read by datasets.load_dataset, and hf-attn-swap convert reads one by --data."
        )
    if not len(data):
        raise ValueError("there are no rows to convert on.")
    first = next((row for row in (data[number] for number in range(len(data))) if row is not None), None)
    if isinstance(first, Mapping):
        rows = _ready(root, data, first)
    elif first is None or isinstance(first, str) or _is_pair(first):
        rows = _texts(root, data, processor, length)
    elif hasattr(first, "convert"):
        rows = _images(root, data, processor)
    else:
        raise ValueError(f"a row must be a text, a pair of texts, an image or a mapping, got {type(first).__name__}.")
    names = frozenset(name for name in inspect.signature(root.forward).parameters if not is_label(name))
    collate = _Collate(names=names, pads=processor, numbers=gives_numbers(root))
    some = [rows[index] for index in sample(len(rows))]
    lengths = [_length(row) for row in some]
    if len(set(lengths)) > 1 and processor is None:
        raise ValueError(UNEQUAL)
    if any(lengths):
        return Rows(rows=rows, collate=collate, length=fmean(lengths), padded=len(set(lengths)) > 1)
    patches = _patches(root, collate([dict(some[0])]).get("pixel_values"))
    return Rows(rows=rows, collate=collate, length=patches, unit=PATCHES if patches else ROWS)


@dataclass(frozen=True)
class _Collate:
    """Makes a batch of rows: only what the model takes, and labels only if each is one class, or one number.

    Other columns, such as the text itself, and labels of another kind never come near the model.

    Attributes:
        names: the inputs of the model.
        pads: the tokenizer, which pads rows of unequal length; or an image processor, or None.
        numbers: True if the labels are the numbers of a regression, False if they are classes.
    """

    names: frozenset[str]
    pads: Any = None
    numbers: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        """A batch of some rows.

        Raises:
            ValueError: the rows have different lengths, and there is no tokenizer.
        """
        inputs = [{name: value for name, value in row.items() if name in self.names} for row in rows]
        if len({_length(row) for row in inputs}) == 1:
            batch: Batch = default_data_collator(inputs)
        elif not hasattr(self.pads, "pad"):
            raise ValueError(UNEQUAL)
        else:
            batch = dict(self.pads.pad(inputs, return_tensors="pt"))
        labels = [_number(row) if self.numbers else _class(row) for row in rows]
        if all(each is not None for each in labels):
            batch["labels"] = torch.tensor(labels)
        return batch


def _label(row: Mapping[str, Any]) -> Any:
    """The row's label, or None."""
    value: Any = next((row[name] for name in LABELS if row.get(name) is not None), None)
    value = value.item() if isinstance(value, Tensor) and value.dim() == 0 else value
    return None if isinstance(value, bool) else value


def _class(row: Mapping[str, Any]) -> int | None:
    """The number of the row's class, or None if it has no label or a label of another kind (-1 is no label)."""
    value = _label(row)
    return int(value) if isinstance(value, Integral) and int(value) >= 0 else None


def _number(row: Mapping[str, Any]) -> float | None:
    """The number that a regression should give for the row, or None."""
    value = _label(row)
    return float(value) if isinstance(value, Real) else None


def _length(row: Mapping[str, Any]) -> int:
    """The number of tokens of a row; 0 without token ids."""
    ids = row.get("input_ids", ())
    return ids.numel() if isinstance(ids, Tensor) else len(ids)


def _patches(root: PreTrainedModel, pixels: Any) -> float:
    """The number of patches of an image; 0 if the model has no patches of one size."""
    size = getattr(root.config, "patch_size", None)
    if size is None or not isinstance(pixels, Tensor):
        return 0
    height, width = (size, size) if isinstance(size, int) else size
    return (pixels.shape[-2] // height) * (pixels.shape[-1] // width)


def _ready(root: PreTrainedModel, data: Any, first: Mapping[str, Any]) -> Any:
    if root.main_input_name not in first:
        raise ValueError(
            f"{type(root).__name__} takes {root.main_input_name}, but the rows have {', '.join(sorted(first))}; pass "
            "the texts or images themselves, such as data['text'], with the tokenizer or image processor as processor."
        )
    return data


def _is_pair(row: Any) -> bool:
    return isinstance(row, (tuple, list)) and len(row) == 2 and all(map(_is_text, row))


def _is_text(value: Any) -> bool:
    """True for a text, and for None in the place of a text."""
    return value is None or isinstance(value, str)


def _filled(texts: Sequence[Any]) -> list[tuple[str, ...]]:
    """The texts of every row, one or two, without the rows that have a blank text or none."""
    paired = any(map(_is_pair, texts))
    filled = []
    for number, row in enumerate(texts):
        if not (_is_pair(row) if paired else _is_text(row)):
            kind = "pair of texts" if paired else "text"
            raise ValueError(f"row {number} is no {kind}, as other rows are, but {row!r:.60}.")
        parts = tuple(row) if paired else (row,)
        if not any(map(is_blank, parts)):
            filled.append(parts)
    return filled


def _texts(root: PreTrainedModel, texts: Sequence[Any], tokenizer: Any, length: int) -> list[dict[str, Any]]:
    """Blocks of tokens for a causal language model, a row per text or per pair of texts for any other model."""
    if root.main_input_name != "input_ids":
        raise ValueError(f"{type(root).__name__} takes {root.main_input_name}, but the data are texts.")
    if tokenizer is None:
        raise ValueError("texts need a tokenizer; pass it as processor=AutoTokenizer.from_pretrained(...).")
    filled = _filled(texts)
    if not filled:
        raise ValueError("every text is blank.")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if not predicts_next(root):
        return [dict(tokenizer(*pair, truncation=True, max_length=length)) for pair in filled]
    if any(len(pair) > 1 for pair in filled):
        raise ValueError("a causal language model takes texts; pairs of texts are for a classifier of two texts.")
    stream = [i for (text,) in filled for i in tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    blocks = [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
    if len(blocks) < 2:
        raise ValueError(
            f"the texts have {len(stream):,} tokens, less than two blocks of {length}; bring more text or a smaller "
            "length."
        )
    return [{"input_ids": block} for block in blocks]


@dataclass(frozen=True)
class _Images:
    """The pixels (3,S,S) of images, made when they are read: all of them at once can be more than the memory holds."""

    images: Sequence[Any]
    processor: Any

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.images[index]
        _check_image(index, image)
        return {"pixel_values": self.processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]}


def _check_image(index: int, image: Any) -> None:
    if not hasattr(image, "convert"):
        raise ValueError(f"row {index} is no image, as other rows are, but {image!r:.60}.")


def _images(root: PreTrainedModel, images: Sequence[Any], processor: Any) -> _Images:
    if root.main_input_name != "pixel_values":
        raise ValueError(f"{type(root).__name__} takes {root.main_input_name}, but the data are images.")
    if processor is None:
        raise ValueError("images need an image processor; pass it as processor=AutoImageProcessor.from_pretrained(...)")
    if isinstance(images, (list, tuple)):  # a column of a `Dataset` would decode all of its images
        for index, image in enumerate(images):
            _check_image(index, image)
    return _Images(images, processor)


def is_blank(value: Any) -> bool:
    """True for a missing value, and for a text without letters."""
    return value is None or (isinstance(value, str) and not value.strip())
