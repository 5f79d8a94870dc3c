"""Outliers in the hidden states after each layer of a model.

Kurtosis is a mean over rows and layers (3 for a normal distribution). The infinity norm is the largest of the layers'
means over rows of max |a|. Padding does not count. OutEffHop (Hu et al., 2024), section 4.
Axes: B batch, L token, E model width.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..measuring.batches import as_batches, evaluating, forward, read_by_decoder, token_mask
from ..wiring.install import model_root
from . import metrics
from .largest import Largest


@dataclass(frozen=True, kw_only=True)
class Outliers:
    """The outliers of one model on some rows.

    Attributes:
        kurtosis: the mean over rows and layers.
        max_inf_norm: the largest of the layers' means over rows.
        largest: the largest activation after each layer, and its token.
    """

    kurtosis: float
    max_inf_norm: float
    largest: tuple[Largest, ...]


@torch.no_grad()
def outliers(model: nn.Module, batches: Iterable[Any]) -> Outliers | None:
    """Outliers in the outputs of a model's layers, in evaluation mode; the embeddings are left out.

    Args:
        model: a transformers model, stock or swapped.
        batches: dicts of tensors as the model takes them.

    Returns:
        None if the model gives no hidden states of the form (B,L,E), as models without layers of tokens do.

    Raises:
        ValueError: there are no batches, or a row has no real token.
    """
    kurtosis, norms = [], []
    largest: list[Largest] = []
    with evaluating(model):
        for batch in as_batches(batches):
            states = _states(forward(model, {**batch, "output_hidden_states": True}))
            if not states:
                return None
            real = [token_mask(read_by_decoder(batch), layer) for layer in states]
            pairs = list(zip(states, real, strict=True))
            kurtosis.append(torch.stack([metrics.kurtosis(*pair).cpu() for pair in pairs], -1))
            norms.append(torch.stack([metrics.max_inf_norm(*pair).cpu() for pair in pairs], -1))
            ids = batch.get("decoder_input_ids" if model_root(model).config.is_encoder_decoder else "input_ids")
            largest = largest or [Largest()] * len(pairs)
            largest = [former.or_larger(*pair, ids) for former, pair in zip(largest, pairs, strict=True)]
    return Outliers(
        kurtosis=float(torch.cat(kurtosis).mean()),
        max_inf_norm=float(torch.cat(norms).mean(0).max()),
        largest=tuple(largest),
    )


def _states(output: Any) -> list[Tensor]:
    """The outputs (B,L,E) of the layers; of the decoder, in a model with an encoder and a decoder."""
    layers = getattr(output, "hidden_states", None) or getattr(output, "decoder_hidden_states", None) or ()
    return [states for states in layers[1:] if isinstance(states, Tensor) and states.dim() == 3]
