"""Batches for fitting and for transfer: plain dicts of tensors without labels, and which of their tokens are real.

Axes: B batch, L token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Any]
LABELS = ("labels", "label", "label_ids")
MASKS = ("attention_mask", "decoder_attention_mask")


def as_batches(batches: Iterable[Any]) -> Iterator[Batch]:
    """Batches without their labels, one at a time.

    Raises:
        ValueError: there are none, or one is no dict of tensors.
    """
    empty = True
    for batch in [batches] if isinstance(batches, Mapping) else batches:
        empty = False
        if not isinstance(batch, Mapping) or not any(isinstance(value, Tensor) for value in batch.values()):
            raise ValueError(f"a batch is a dict of tensors as the model takes them, got {type(batch).__name__}.")
        yield without_labels(batch)
    if empty:
        raise ValueError("there are no batches; pass a few dicts of tensors as the model takes them.")


def without_labels(batch: Mapping[str, Any]) -> Batch:
    """What the model reads: nothing here is supervised."""
    return {key: value for key, value in batch.items() if key not in LABELS}


@torch.no_grad()
def forward(model: nn.Module, batch: Batch) -> None:
    """Run a model on a batch, wherever the model is; what comes out is of no use here."""
    device = next(model.parameters()).device
    if device.type != "meta":  # offloaded weights wait there; accelerate brings the batch to where they compute
        batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    model(**batch)


def token_mask(batch: Batch, tokens_BL: Tensor) -> Tensor:
    """(B,L) bool, True for real tokens of a tensor (B,L,...) inside the model.

    Raises:
        ValueError: the batch has a mask that says nothing of these tokens.
    """
    shape = tokens_BL.shape[:2]
    masks = [batch[name] for name in MASKS if batch.get(name) is not None]
    for mask in masks:
        if mask.shape == shape:
            real: Tensor = mask.to(device=tokens_BL.device, dtype=torch.bool)
            return real
    if masks:
        raise ValueError(
            f"an attention mask of shape {tuple(masks[0].shape)} does not say which of {tuple(shape)} tokens are real; "
            "pass the 2-D mask that the tokenizer gives."
        )
    return torch.ones(shape, dtype=torch.bool, device=tokens_BL.device)
