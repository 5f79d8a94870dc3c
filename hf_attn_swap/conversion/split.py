"""Divides the data of a conversion into training rows and held-out rows, and tries the longest row."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..measuring.batches import evaluating, forward, without_labels
from ..measuring.positions import max_positions
from .rows import ROWS, Rows, as_rows, countable

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
            f"a row has {size:,} tokens, and the model has {positions:,} positions; take length={positions} or less."
        )
    _check_tokens(root, batch)
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


def _check_tokens(root: PreTrainedModel, batch: Any) -> None:
    """Refuse a token that the model does not have: the tokenizer is most likely that of another model.

    Raises:
        ValueError: a number in `input_ids` is as large as the number of embeddings, or larger.
    """
    ids = batch.get("input_ids")
    try:
        known = getattr(root.get_input_embeddings(), "num_embeddings", None)
    except NotImplementedError:  # a model that has none
        known = None
    if known is not None and isinstance(ids, torch.Tensor) and int(ids.max()) >= known:
        raise ValueError(
            f"a row has the token {int(ids.max()):,}, and {type(root).__name__} knows {known:,} tokens; give the "
            "tokenizer of this model (processor=)."
        )
