"""Divides the data of a conversion into training rows and held-out rows, and tries the longest row."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from ..measuring.batches import evaluating, forward, without_labels
from .rows import Rows, as_rows

FEWEST_HELD = 8  # rows that the loss is measured on
HELD_TOKENS = 8192  # tokens or patches that the loss is measured on, if there are many rows
HELD_ROWS = 64  # the same, for data that have neither


def split(root: PreTrainedModel, data: Any, eval_data: Any, processor: Any, length: int) -> tuple[Rows, Rows]:
    """The training rows and the held-out rows. Without held-out data, a twentieth of the data is held out.

    Raises:
        ValueError: there are no rows to hold out.
    """
    rows = as_rows(root, data, processor, length=length)
    if eval_data is not None:
        return rows, as_rows(root, eval_data, processor, length=length)
    enough = round(HELD_TOKENS / rows.length) if rows.length else HELD_ROWS
    count = max(FEWEST_HELD, min(enough, len(rows) // 20))
    if len(rows) < 2 * count:
        count = len(rows) // 2
    if not count:
        raise ValueError("a single row cannot be both trained and measured on; bring more data.")
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    return rows.some(sorted(shuffled[count:])), rows.some(sorted(shuffled[:count]))


def try_longest(root: PreTrainedModel, rows: Rows) -> Any:
    """Run the stock model on the longest of some rows. Returns the output.

    Raises:
        ValueError: the model cannot read the row.
    """
    batch = rows.collate([rows.longest()])
    size = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
    positions = getattr(root.config, "max_position_embeddings", None)
    try:
        with evaluating(root):
            return forward(root, without_labels(batch))
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        if isinstance(positions, int) and size > positions:
            raise ValueError(
                f"a row has {size} tokens, and the model has {positions} positions; take length={positions} or less."
            ) from error
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{type(root).__name__} cannot read a row with {', '.join(sorted(batch))}: {reason}. Rows that are ready "
            "must hold every input that the model needs, such as decoder_input_ids."
        ) from error
