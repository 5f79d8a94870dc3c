"""Smooths the channels of a patched model's activations, so that one 8-bit range serves all channels of a tensor.

Some channels of a pretrained model are always many times larger than the others. Where the scale of channels is free
(`gauge.py`), channel c is divided by s_c = 2^k_c where it is made and multiplied by it where it is read. The model
stays the same function, to the bit, because s_c is a power of two: SmoothQuant's s = max|x|^a / max|w|^(1-a), rounded.
Xiao et al. (2023), equation 4, SmoothQuant; powers of two and the search for a are this package's own.
docs/mathematics.md, section Smoothed channels. Axes: C channel, N token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..layer.smoothing import LARGEST_POWER, Pair, Smoothing, axes, relative, scale_, scaled
from ..measuring.batches import Batch, as_batches, evaluating, forward, read_by, token_mask
from ..patch import need_installation
from ..quantization.places import quantizable
from ..quantization.points import Point, rounded_rows
from ..wiring.install import Installation
from ..wiring.layers import Layer
from .gauge import Gauge, gauges, is_matrix, weights
from .neutral import tensors

ALPHAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)  # that are tried; 0 stands for no smoothing
TOKENS = 512  # of each held-out batch that an alpha is tried on
SMALLEST = 1e-5  # a channel or a column of weights below counts as this


@dataclass(frozen=True, kw_only=True)
class Smoothed:
    """What `smooth` did.

    Attributes:
        alphas: by the path of the module that gives the channels: alpha; 0 where no alpha was better than none.
        spread: by the same path, the largest channel over the median channel, before and after.
        kept: the number of channels that were left, because a weight would have lost bits.
    """

    alphas: Mapping[str, float]
    spread: Mapping[str, tuple[float, float]]
    kept: int

    def __str__(self) -> str:
        count = sum(alpha > 0 for alpha in self.alphas.values())
        before, after = (max(each) for each in zip(*self.spread.values(), strict=True))
        words = f"The channels of {count} of {len(self.alphas)} places are smoothed. Largest channel over the median: "
        words += f"{after:,.1f} ({before:,.1f} before)."
        return words + (f" {self.kept} channels are left, because weights would lose bits." if self.kept else "")


def smooth(model: nn.Module, batches: Iterable[Any], alpha: float | None = None, *, progress: bool = True) -> Smoothed:
    """Smooth the channels between norms (or matrices) and the matrices that read them, in place; the same function.

    Only places around swapped layers count. Weights change by powers of two, and each layer keeps these powers, so that
    `unpatch_model` gives the original weights, bit for bit, also from a checkpoint. A model that was smoothed before is
    smoothed anew. Smooth after training: it changes the sizes of weights, which an optimiser's steps do not follow.
    Xiao et al. (2023), SmoothQuant; docs/mathematics.md, section Smoothed channels.

    Args:
        model: a patched model, patched with any variant.
        batches: a few dicts of tensors as the model takes them; labels are ignored.
        alpha: from 0 to 1, how much of the unevenness moves from the activations into the weights. None finds an alpha
            for each place, which costs a second pass: every fourth batch, at least one, is held out, and the smallest
            error of the readers' outputs in 8 bits decides.
        progress: show progress bars.

    Returns:
        What was done.

    Raises:
        ValueError: the model is not patched, has adapters, or is offloaded; alpha is out of range; there are no
            batches, or a single one without an alpha; no place of the model is free; or the model with other
            scales is not the same function. The model is then unchanged.
    """
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha <= 1):
        raise ValueError(f"alpha must be a number above 0 and at most 1, or None for a search, got {alpha!r}.")
    installation = need_installation(model)
    _refuse_adapters(installation)
    rows = list(as_batches(batches))
    if alpha is None and len(rows) < 2:
        raise ValueError("one batch cannot be both measured and held out; pass two batches or more, or an alpha.")
    with evaluating(model), torch.no_grad(), _anew(installation):
        places = _places(installation, rows[0])
        held = rows[3::4] or rows[-1:]
        fitted = rows if alpha is not None else [row for row in rows if not any(row is each for each in held)]
        with _read(installation, places.values()) as seen:
            for row in tqdm(fitted, desc="channels", unit="batch", disable=not progress, leave=False):
                seen.batch = row
                forward(model, row)
        sizes = {name: _Sizes(installation.root, places[name].gauge, *ends) for name, ends in seen.ends.items()}
        alphas = dict.fromkeys(sizes, 0.0 if alpha is None else float(alpha))
        if alpha is None:
            with _tried(installation, places, sizes) as errors:
                for row in tqdm(held, desc="alphas", unit="batch", disable=not progress, leave=False):
                    errors.batch = row
                    forward(model, row)
            alphas = {name: min(found, key=lambda each: found[each]) for name, found in errors.sums.items()}
        powers = {name: sizes[name].powers(each) for name, each in alphas.items()}
        kept = _kept(installation.root, places, powers)
        _write(model, installation, places, powers, rows[0])
    return Smoothed(alphas=alphas, spread={name: sizes[name].spread(powers[name]) for name in sizes}, kept=kept)
