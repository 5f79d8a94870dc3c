"""Turns what a user has (texts, images, or rows that are ready) into rows for a conversion, and rows into batches.

No more is read than is needed. Data that can be counted (a list, a `Dataset`) are read in random places. Other data,
such as an `IterableDataset`, are a stream: they are read from the first row on, and may have no end. `split` divides
the rows into those that train and those that are held out.

Axes: L token.
"""

from __future__ import annotations

import inspect
import itertools
import math
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral, Real
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset
from transformers import PreTrainedModel, default_data_collator

from ..measuring.batches import (
    LABELS,
    Batch,
    evaluating,
    forward,
    gives_numbers,
    is_label,
    max_positions,
    without_labels,
)
from ..measuring.lost import predicts_next
from ..text.tokenizer import own_tokenizer
from ..wiring.install import model_root

Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]
SAMPLE = 256  # rows whose length tells how long the rows are
MOST_ROWS = 2**18  # of data that can be counted
LONG = 2**20  # letters: a longer text is read in parts
RUN = 4  # blocks of text that are read in one place
LETTERS = 4  # of a token, roughly
NEIGHBOURS = 64  # texts that are read in one place, if each is a row
WINDOW = 50  # batches whose rows are sorted by length
TOKENS, PATCHES, ROWS = "tokens", "patches", "rows"
BLANK = "every text is blank."
NO_ROWS = "there are no rows to convert on."
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
        whole: True if these are all rows of the user's data.
    """

    rows: Any
    collate: Collator
    length: float
    unit: str = TOKENS
    padded: bool = False
    whole: bool = True

    def __len__(self) -> int:
        return len(self.rows)

    def some(self, indices: Sequence[int]) -> Rows:
        """Some of the rows."""
        return replace(self, rows=select(self.rows, indices))

    def at_most(self, size: float) -> Rows:
        """The rows, or as many of them as have `size` tokens (patches, rows) together, drawn at random."""
        count = max(1, math.ceil(size / (self.length or 1)))
        if count >= len(self):
            return self
        return replace(self.some(sorted(itertools.islice(shuffled(len(self)), count))), whole=False)

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


def as_rows(
    model: nn.Module,
    data: Any,
    processor: Any = None,
    *,
    length: int = 512,
    most: float | None = None,
    most_rows: int = 1024,
    fewest: int = 0,
) -> Rows:
    """Prepare the data of a conversion, and read no more of them than is needed.

    Rows of a sequence are made when a batch needs them. Only the joined text of a causal language model is made at
    once: of random places, until it has `most` tokens. A stream is read from its first row on, and what was read stays
    in memory. Of more than 262,144 rows of a sequence, so many are drawn at random, always the same.

    Args:
        model: the model that will take the rows.
        data: texts, pairs of texts (for a classifier of two texts), images (PIL), or rows that are ready: mappings with
            `input_ids` or `pixel_values`, without a batch axis, such as a tokenised `Dataset`. They are a sequence; or,
            with `most`, a stream, such as an `IterableDataset` or a generator, which may have no end.
        processor: the tokenizer or image processor; not needed for rows of one length that are ready.
        length: the number of tokens of a row. For a causal language model, the texts are joined and cut into blocks of
            this length; for other models, a longer text is cut.
        most: the number of tokens of text, or of patches of images, that is enough; None reads all.
        most_rows: the number of rows of a stream that is enough, if they have neither tokens nor patches.
        fewest: at least so many rows are read of a stream, or of a text.

    Raises:
        ValueError: there are no rows, the data are of another kind than the model takes, a processor is missing, or
            the text is shorter than two blocks.
    """
    root, processor = model_root(model), own_tokenizer(processor)
    readable = countable(data) or (most is not None and isinstance(data, Iterable))
    if not readable or isinstance(data, (str, Mapping)) or hasattr(data, "iloc"):  # pandas counts by its index
        raise ValueError(
            f"data must be a sequence of texts, images or rows that are ready, got {type(data).__name__}; a file is "
            "read by datasets.load_dataset, a column of pandas is data.tolist(), and hf-attn-swap convert reads a file "
            "by --data."
        )
    first, data = _peek(data)
    names = frozenset(name for name in inspect.signature(root.forward).parameters if not is_label(name))
    collate = _Collate(names=names, processor=processor, regression=gives_numbers(root))
    rows: Any
    if first is None or isinstance(first, str) or _is_pair(first):
        need = "texts need a tokenizer; pass it as processor=AutoTokenizer.from_pretrained(...)."
        _check_input(root, "input_ids", processor, need)
        if predicts_next(root) and _is_pair(first):
            raise ValueError("a causal language model takes texts; pairs of texts are for a classifier of two texts.")
        if predicts_next(root):
            rows, whole = _blocks(data, processor, length, most, fewest)
        else:
            rows, whole = _texts(data, processor, length, most, fewest, paired=_is_pair(first))
    elif isinstance(first, Mapping):
        if root.main_input_name not in first:
            raise ValueError(
                f"{type(root).__name__} takes {root.main_input_name}, but the rows have {', '.join(sorted(first))}; "
                "pass the texts or images themselves, such as data['text'], with the tokenizer or image processor as "
                "processor."
            )
        patches = 0 if countable(data) else _patches(root, collate([dict(first)]))
        enough = most if patches or _length(first) else most_rows
        rows, whole = _at_most(data, lambda row: _length(row) or patches or 1, enough, fewest)
    elif hasattr(first, "convert"):
        need = "images need an image processor; pass it as processor=AutoImageProcessor.from_pretrained(...)."
        _check_input(root, "pixel_values", processor, need)
        if isinstance(data, (list, tuple)):  # a column of a `Dataset` would decode all of its images
            _check_images(data)
        pixels = partial(_pixels, processor=processor)
        patches = 0 if countable(data) else _patches(root, collate([pixels(first)]))
        images, whole = _at_most(data, lambda _: patches or 1, most if patches else most_rows, fewest)
        rows = _MadeWhenRead(images, pixels)
    else:
        raise ValueError(f"a row must be a text, a pair of texts, an image or a mapping, got {type(first).__name__}.")
    some = [rows[index] for index in sample(len(rows))]
    lengths = [_length(row) for row in some]
    if len(set(lengths)) > 1 and processor is None:
        raise ValueError(UNEQUAL)
    if any(lengths):
        return Rows(rows=rows, collate=collate, length=fmean(lengths), padded=len(set(lengths)) > 1, whole=whole)
    patches = _patches(root, collate([dict(some[0])]))
    return Rows(rows=rows, collate=collate, length=patches, unit=PATCHES if patches else ROWS, whole=whole)


def is_blank(value: Any) -> bool:
    """True for a missing value, and for a text without letters."""
    return value is None or (isinstance(value, str) and not value.strip())


def token_ids(text: str, tokenizer: Any) -> Iterator[list[int]]:
    """The tokens of a text without special tokens, piece by piece of a very long one."""
    for piece in parts_of(text):
        yield tokenizer(piece, add_special_tokens=False, verbose=False)["input_ids"]


def _peek(data: Any) -> tuple[Any, Any]:
    """The first row that is not None, and the data with it; None if every row is.

    Raises:
        ValueError: there are no rows.
    """
    rows = (data[number] for number in range(len(data))) if countable(data) else iter(data)
    read = []
    for row in rows:
        read.append(row)
        if row is not None:
            break
    if not read:
        raise ValueError(NO_ROWS)
    return read[-1], data if countable(data) else itertools.chain(read, rows)


@dataclass(frozen=True)
class _Collate:
    """Makes a batch of rows: only what the model takes, and labels only if each is one class, or one number.

    Other columns, such as the text itself, and labels of another kind never come near the model.

    Attributes:
        names: the inputs of the model.
        processor: the tokenizer, which pads rows of unequal length; or an image processor, or None.
        regression: True if the labels are the numbers of a regression, False if they are classes.
    """

    names: frozenset[str]
    processor: Any = None
    regression: bool = False

    def __call__(self, rows: list[dict[str, Any]]) -> Batch:
        """A batch of some rows.

        Raises:
            ValueError: the rows have different lengths, and there is no tokenizer.
        """
        inputs = [{name: value for name, value in row.items() if name in self.names} for row in rows]
        if len({_length(row) for row in inputs}) == 1:
            batch: Batch = default_data_collator(inputs)
        elif not hasattr(self.processor, "pad"):
            raise ValueError(UNEQUAL)
        else:
            batch = dict(self.processor.pad(inputs, return_tensors="pt"))
        labels = [self._label(row) for row in rows]
        if all(label is not None for label in labels):
            batch["labels"] = torch.tensor(labels)
        return batch

    def _label(self, row: Mapping[str, Any]) -> float | None:
        """The row's number or class, or None if it has no label or a label of another kind (-1 is no class)."""
        label: Any = next((row[name] for name in LABELS if row.get(name) is not None), None)
        label = label.item() if isinstance(label, Tensor) and label.dim() == 0 else label
        if isinstance(label, bool):
            return None
        if self.regression:
            return float(label) if isinstance(label, Real) else None
        return int(label) if isinstance(label, Integral) and int(label) >= 0 else None


@dataclass(frozen=True)
class _MadeWhenRead:
    """Rows that are made of items when they are read."""

    items: Any
    make: Callable[[Any], dict[str, Any]]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.make(self.items[index])


def _encoded(texts: Any, *, tokenizer: Any, length: int) -> dict[str, Any]:
    """The tokens of one text, or of two."""
    return dict(tokenizer(*([texts] if isinstance(texts, str) else texts), truncation=True, max_length=length))


def _block(ids_L: Tensor) -> dict[str, Any]:
    return {"input_ids": ids_L.tolist()}


def _pixels(image: Any, *, processor: Any) -> dict[str, Any]:
    """The pixels (3,S,S) of an image."""
    _check_images([image])
    return {"pixel_values": processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]}


def _length(row: Mapping[str, Any]) -> int:
    """The number of tokens of a row; 0 without token ids."""
    ids = row.get("input_ids", ())
    return ids.numel() if isinstance(ids, Tensor) else len(ids)


def _patches(root: PreTrainedModel, batch: Batch) -> float:
    """The number of patches of an image; 0 if the model has no patches of one size."""
    size, pixels = getattr(root.config, "patch_size", None), batch.get("pixel_values")
    if size is None or not isinstance(pixels, Tensor):
        return 0
    height, width = (size, size) if isinstance(size, int) else size
    return (pixels.shape[-2] // height) * (pixels.shape[-1] // width)


def _at_most(data: Any, size_of: Callable[[Any], float], most: float | None, fewest: int) -> tuple[Any, bool]:
    """The rows of a sequence, or the first rows of a stream; True if these are all."""
    if not countable(data):
        return first_rows(data, size_of, most or 0, fewest)
    if len(data) <= MOST_ROWS:
        return data, True
    return select(data, sorted(itertools.islice(shuffled(len(data)), MOST_ROWS))), False


def _check_input(root: PreTrainedModel, name: str, processor: Any, need: str) -> None:
    """Refuse data that the model does not take, and data without their processor."""
    if root.main_input_name != name:
        raise ValueError(
            f"{type(root).__name__} takes {root.main_input_name}, but the data are {need.partition(' ')[0]}."
        )
    if processor is None:
        raise ValueError(need)


def _check_images(images: Iterable[Any]) -> None:
    for index, image in enumerate(images):
        if not hasattr(image, "convert"):
            raise ValueError(f"row {index} is no image, as other rows are, but {image!r:.60}.")


def _is_pair(row: Any) -> bool:
    return (
        isinstance(row, (tuple, list)) and len(row) == 2 and all(text is None or isinstance(text, str) for text in row)
    )


def _numbered(data: Any, size: int, *, paired: bool) -> Iterator[tuple[int, int, Any]]:
    """The texts, or pairs of texts, as they are read, without blank ones; before each its number and its run's first.

    Raises:
        ValueError: a row is of another kind.
    """
    for start, run in runs(data, size):
        for number, row in enumerate(run, start):
            if not (_is_pair(row) if paired else row is None or isinstance(row, str)):
                kind = "pair of texts" if paired else "text"
                raise ValueError(f"row {number} is no {kind}, as other rows are, but {row!r:.60}.")
            if not any(map(is_blank, row if paired else [row])):
                yield start, number, row


def _texts(
    data: Any, tokenizer: Any, length: int, most: float | None, fewest: int, *, paired: bool
) -> tuple[_MadeWhenRead, bool]:
    """A row per text, or per pair of texts, without those that have a blank one; True if these are all."""
    encode = partial(_encoded, tokenizer=tokenizer, length=length)
    filled = _numbered(data, NEIGHBOURS, paired=paired)
    texts: Any
    if countable(data):
        numbers = sorted(number for _, number, _ in itertools.islice(filled, MOST_ROWS))
        texts, whole = Subset(data, numbers), len(data) <= MOST_ROWS
    else:
        rows = (row for *_, row in filled)
        texts, whole = first_rows(rows, lambda row: _length(encode(row)), most or 0, fewest)
    if not len(texts):
        raise ValueError(BLANK)
    return _MadeWhenRead(texts, encode), whole


def _blocks(data: Any, tokenizer: Any, length: int, most: float | None, fewest: int) -> tuple[_MadeWhenRead, bool]:
    """The texts, joined and cut into blocks of tokens, and True if these are all."""
    enough = math.inf if most is None else max(most, 2 * length, fewest * length)
    ids_of_run: dict[int, array[int]] = {}
    total = 0
    for start, ids in _tokens(data, tokenizer, length):
        ids_of_run.setdefault(start, array("i")).extend(ids)
        total += len(ids)
        if total >= enough:
            break
    if not ids_of_run:
        raise ValueError(BLANK)
    if total < 2 * length:
        raise ValueError(
            f"the texts have {total:,} tokens, less than two blocks of {length}; bring more text or a smaller length."
        )
    joined = array("i")
    for start in sorted(ids_of_run):
        joined += ids_of_run[start]
    ids_L = torch.frombuffer(joined, dtype=torch.int32)
    return _MadeWhenRead(ids_L[: total // length * length].reshape(-1, length), _block), total < enough


def _tokens(data: Any, tokenizer: Any, length: int) -> Iterator[tuple[int, list[int]]]:
    """The tokens of the texts as they are read, with the number of the text at which the reading began."""
    size = 1
    if countable(data):
        letters = [len(text) for text in (data[number] for number in sample(len(data))) if isinstance(text, str)]
        size = math.ceil(RUN * LETTERS * length / max(1.0, fmean(letters or [1])))
    for start, _, text in _numbered(data, size, paired=False):
        for ids in token_ids(text, tokenizer):
            yield start, ids


# -- Reading -----------------------------------------------------------------------------------------------------------


def countable(data: Any) -> bool:
    """True for data with a length and numbered rows; False for a stream."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__")


def sample(count: int) -> range:
    """The numbers of some rows, spread evenly over `count` rows."""
    return range(0, count, max(1, count // SAMPLE))


def shuffled(count: int) -> Iterator[int]:
    """All numbers below `count`, each once, in a random order that is always the same.

    What it takes grows with the numbers that are asked for, and not with `count`.
    """
    draw = random.Random(0)
    moved: dict[int, int] = {}  # the numbers at the places that are left, as in the shuffle of Fisher and Yates
    for place in range(count):
        drawn = draw.randrange(place, count)
        number = moved.pop(place, place)
        if drawn != place:
            number, moved[drawn] = moved.get(drawn, drawn), number
        yield number


def runs(data: Any, size: int) -> Iterator[tuple[int, Sequence[Any]]]:
    """Rows as they are needed, each time with the number of the first: runs of neighbours in random places.

    A stream comes row by row, in its order.
    """
    if not countable(data):
        yield from ((number, [row]) for number, row in enumerate(data))
        return
    for place in shuffled(-(-len(data) // size)):
        start, stop = place * size, min((place + 1) * size, len(data))
        yield start, data[start:stop] if isinstance(data, Sequence) else [data[i] for i in range(start, stop)]


def first_rows(
    stream: Iterable[Any], size_of: Callable[[Any], float], most: float, fewest: int
) -> tuple[list[Any], bool]:
    """The first rows of a stream: of the size `most` together, and not fewer than `fewest`; True if these are all."""
    rows, size = [], 0.0
    for row in stream:
        rows.append(row)
        size += size_of(row)
        if size >= most and len(rows) >= fewest:
            return rows, False
    return rows, True


def parts_of(text: str) -> Iterator[str]:
    """The text, or the parts of a very long one, cut between two words."""
    start = 0
    while len(text) - start > LONG:
        stop = max(text.rfind(mark, start + 1, start + LONG) for mark in " \n")
        stop = start + LONG if stop < 0 else stop
        yield text[start:stop]
        start = stop
    yield text[start:]


# -- Rows that train, and rows that are held out -----------------------------------------------------------------------

FEWEST_HELD = 8  # rows that the loss is measured on
HELD_TOKENS = 8192  # tokens or patches that the loss is measured on, if there are many rows
HELD_ROWS = 64  # the same, for data that have neither
EVAL_TOKENS = 32_768  # tokens or patches of held-out data of the user's own
EVAL_ROWS = 256  # the same, for data that have neither
POOL = 2**18  # tokens that are read of texts that can be counted, also for a small budget
FEWEST_TOKENS, FEWEST_ROWS = 32_768, 256  # that are read of a stream, also for a small budget: a calibration reads them


def split(
    root: PreTrainedModel,
    data: Any,
    eval_data: Any,
    processor: Any,
    length: int,
    *,
    tokens: int,
    eval_tokens: int | None = None,
) -> tuple[Rows, Rows]:
    """The training rows and the held-out rows. Without held-out data, a twentieth of the data is held out.

    Of a stream, or of a long text, no more is read than these rows.

    Args:
        root: the model.
        data: as in `as_rows`.
        eval_data: held-out data of the same kind, or None.
        processor: as in `as_rows`.
        length: the number of tokens of a row.
        tokens: the budget of the training, in tokens (patches of images).
        eval_tokens: what is read of `eval_data` at most, in tokens (patches of images, rows of other data); None is
            32,768 tokens or patches, or 256 rows.

    Raises:
        ValueError: there are no rows to hold out.
    """
    most = HELD_TOKENS + max(tokens, POOL if countable(data) else FEWEST_TOKENS)
    rows = as_rows(root, data, processor, length=length, most=most, fewest=HELD_ROWS + FEWEST_ROWS)
    if eval_data is not None:
        return rows, _measured_on(root, eval_data, processor, length, eval_tokens)
    enough = round(HELD_TOKENS / rows.length) if rows.length else HELD_ROWS
    count = max(FEWEST_HELD, min(enough, len(rows) // 20) if rows.whole else enough)
    if len(rows) < 2 * count:
        count = len(rows) // 2
    if not count:
        raise ValueError("a single row cannot be both trained and measured on; bring more data.")
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    return rows.some(sorted(shuffled[count:])), rows.some(sorted(shuffled[:count]))


def _measured_on(root: PreTrainedModel, data: Any, processor: Any, length: int, tokens: int | None) -> Rows:
    """Held-out rows of the user's own, as many as are measured on."""
    some = EVAL_ROWS if tokens is None else tokens
    most = EVAL_TOKENS if tokens is None else tokens
    rows = as_rows(root, data, processor, length=length, most=most, most_rows=some, fewest=1)
    return rows.at_most(some if rows.unit == ROWS else most)


def try_longest(root: PreTrainedModel, rows: Rows) -> Any:
    """Run the stock model on the longest of some rows. Returns the output.

    Raises:
        ValueError: the model cannot read the row, or was made for fewer positions.
    """
    batch = rows.collate([rows.longest()])
    size = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
    positions = max_positions(root)
    if positions is not None and size > positions:  # rotary positions run on without an error, and mean nothing there
        raise ValueError(
            f"a row has {size:,} tokens, and the model has {positions:,} positions; take length={positions} or less "
            "(in a shell --length)."
        )
    largest = int(batch["input_ids"].max()) if size else 0
    known = getattr(root.get_input_embeddings(), "num_embeddings", math.inf) if size else math.inf
    if largest >= known:
        raise ValueError(
            f"a row has the token {largest:,}, and {type(root).__name__} knows {known:,} tokens; "
            "give the tokenizer of this model (processor=, in a shell --tokenizer)."
        )
    try:
        with evaluating(root):
            return forward(root, without_labels(batch))
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{type(root).__name__} cannot read a row with {', '.join(sorted(batch))}: {reason}. Rows that are ready "
            "must hold every input that the model needs, such as decoder_input_ids."
        ) from error
