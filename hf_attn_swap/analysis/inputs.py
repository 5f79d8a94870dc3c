"""The inputs of a report: batches of real text or images, and one sample whose attention is drawn.

Axes: B batch, T token, S side of an image.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from torch import Tensor
from transformers import PreTrainedModel

from ..conversion.rows import is_blank
from ..measuring.batches import Batch
from ..publish.checkpoint import processor_of
from ..text.tokenizer import own_tokenizer

SHOWN_TOKENS = 32  # of the row whose attention is drawn


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The batches of a recording, and the sample.

    Attributes:
        batches: the batches, in the form that the model takes.
        sample: the row whose attention is drawn, without padding.
        tokens: the tokens of the sample; empty for an image.
        image: the pixels (S,S,3) of the sample, from 0 to 1; None for a text.
        sink_ids: ids of separators.
        rows: number of rows.
        words: the text of every token of the batches, by its id; empty for images.
    """

    batches: list[Batch]
    sample: Batch
    tokens: tuple[str, ...]
    image: np.ndarray | None
    sink_ids: tuple[int, ...]
    rows: int
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
    shown: int,
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
        shown: index of the row whose attention is drawn.
        hub: `revision` and `token`, for `source` on the Hub.

    Raises:
        ValueError: the model takes neither text nor images, there is no processor, the row to draw does not exist, or
            the column holds values of another kind.
    """
    if model.main_input_name not in ("input_ids", "pixel_values"):
        raise ValueError(f"a report is for models of text or images; this one takes {model.main_input_name}.")
    every = (tuple(row[name] for name in columns) for row in rows.select_columns(list(dict.fromkeys(columns))))
    filled = (row for row in every if not any(map(is_blank, row)))
    values = list(itertools.islice(filled, limit))
    if not values:
        raise ValueError(f"column {' or '.join(map(repr, columns))} holds no text: every row is blank.")
    if not 0 <= shown < len(values):
        raise ValueError(f"row {shown} cannot be shown: there are {len(values)} rows, counted from 0.")
    images = model.main_input_name == "pixel_values"
    if images and len(columns) > 1:
        raise ValueError("this model takes images; name one column.")
    processor = own_tokenizer(processor_of(model, source, hub))
    like = next(model.parameters())
    if images:
        return _images(processor, [row[0] for row in values], batch_size, shown, like)
    return _texts(processor, values, batch_size, shown, like.device, max_length)


def _texts(
    tokenizer: Any, values: list[tuple[Any, ...]], size: int, shown: int, device: torch.device, max_length: int
) -> Inputs:
    if not all(isinstance(text, str) for row in values for text in row):
        raise ValueError("this model takes text; name the column that holds it.")
    options = {"return_tensors": "pt", "truncation": True, "padding": True}
    order = sorted(values, key=lambda row: sum(map(len, row)))

    def encode(rows: list[tuple[Any, ...]], longest: int) -> Batch:
        return dict(tokenizer(*map(list, zip(*rows, strict=True)), max_length=longest, **options).to(device))

    batches = [encode(order[start : start + size], max_length) for start in range(0, len(order), size)]
    sample = encode([values[shown]], SHOWN_TOKENS)
    separators = (tokenizer.sep_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    return Inputs(
        batches=batches,
        sample=sample,
        tokens=tuple(tokenizer.convert_ids_to_tokens(sample["input_ids"][0].tolist())),
        image=None,
        sink_ids=tuple({identity for identity in separators if identity is not None}),
        rows=len(values),
        words=words_of(tokenizer, batches),
    )


def words_of(tokenizer: Any, batches: Sequence[Batch]) -> dict[int, str]:
    """The text of every token of some batches, by its id."""
    ids = sorted({identity for batch in batches for identity in batch["input_ids"].flatten().tolist()})
    return {identity: tokenizer.decode([identity]) for identity in ids}


def _images(processor: Any, values: list[Any], size: int, shown: int, like: Tensor) -> Inputs:
    if not all(hasattr(value, "convert") for value in values):
        raise ValueError("this model takes images; name the column that holds them.")
    images = [value.convert("RGB") for value in values]

    def encode(rows: list[Any]) -> Batch:
        return {"pixel_values": processor(rows, return_tensors="pt")["pixel_values"].to(like)}

    batches = [encode(images[start : start + size]) for start in range(0, len(images), size)]
    sample = encode([images[shown]])
    pixels = sample["pixel_values"][0].permute(1, 2, 0).float().cpu().numpy()
    low, high = pixels.min(), pixels.max()
    return Inputs(
        batches=batches,
        sample=sample,
        tokens=(),
        image=(pixels - low) / max(float(high - low), 1e-6),
        sink_ids=(),
        rows=len(images),
        words={},
    )
