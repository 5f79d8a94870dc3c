"""The inputs of a report: batches of real text or images."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedModel

from ..measuring.batches import Batch
from ..publish.checkpoint import processor_of
from ..text.tokenizer import own_tokenizer
from ..training.data import filled_rows


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The batches of a recording.

    Attributes:
        batches: the batches, in the form that the model takes.
        rows: number of rows.
        sink_ids: ids of separators.
        words: the text of every token of the batches, by its id; empty for images.
    """

    batches: list[Batch]
    rows: int
    sink_ids: tuple[int, ...] = ()
    words: Mapping[int, str]


def prepare(
    model: PreTrainedModel,
    source: str,
    rows: Dataset | IterableDataset,
    columns: Sequence[str],
    *,
    limit: int,
    batch_size: int,
    max_length: int,
    hub: Mapping[str, Any],
) -> Inputs:
    """Make the batches for a text or an image model, with the tokenizer or image processor of the model.

    Args:
        model: the model; its main input says whether it takes text or images.
        source: name or folder of the tokenizer or image processor.
        rows: the data set, or a stream of one.
        columns: the name of the column that holds the text or the image, or of the two that hold pairs of texts.
        limit: the number of rows to take, from the first. Rows with a blank text are left out and do not count.
        batch_size: number of rows per batch.
        max_length: number of tokens that are kept of a text.
        hub: `revision` and `token`, for `source` on the Hub.

    Raises:
        ValueError: the model takes neither text nor images, there is no processor, or the column holds values of
            another kind.
    """
    if model.main_input_name not in ("input_ids", "pixel_values"):
        raise ValueError(f"a report is for models of text or images; this one takes {model.main_input_name}.")
    values = list(itertools.islice(filled_rows(rows, columns), limit))
    images = model.main_input_name == "pixel_values"
    kind, method = ("images", "convert") if images else ("text", "strip")
    if not all(hasattr(part, method) for row in values for part in (row if isinstance(row, tuple) else (row,))):
        raise ValueError(f"this model takes {kind}; name the column that holds them.")
    processor = own_tokenizer(processor_of(model, source, hub))
    like = next(model.parameters())
    if images:
        pictures = [value.convert("RGB") for value in values]
        batches: list[Batch] = [
            {"pixel_values": processor(list(some), return_tensors="pt")["pixel_values"].to(like)}
            for some in _batched(pictures, batch_size)
        ]
        return Inputs(batches=batches, rows=len(values), words={})
    pairs = [row if isinstance(row, tuple) else (row,) for row in values]
    batches = []
    for some in _batched(sorted(pairs, key=lambda row: sum(map(len, row))), batch_size):
        texts = map(list, zip(*some, strict=True))
        encoded = processor(*texts, return_tensors="pt", truncation=True, padding=True, max_length=max_length)
        batches.append(dict(encoded.to(like.device)))
    separators = {processor.sep_token_id, processor.bos_token_id, processor.eos_token_id} - {None}
    return Inputs(batches=batches, rows=len(values), sink_ids=tuple(separators), words=words_of(processor, batches))


def _batched(rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def words_of(tokenizer: Any, batches: Sequence[Batch]) -> dict[int, str]:
    """The text of every token of some batches, by its id."""
    ids = sorted({token for batch in batches for token in batch["input_ids"].flatten().tolist()})
    return {token: tokenizer.decode([token]) for token in ids}
