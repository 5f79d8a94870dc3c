"""Measures how much of the attention `clipped_softmax` cuts away, and chooses gamma by this share.

With zeta = 1, the clip turns a weight p into max(p - |gamma| (1 - p), 0), so p loses min(p, |gamma| (1 - p)). The share
of a layer is what its weights lose, as a part of their sum. Both sums run over all heads and over the queries that are
real tokens. A row of K weights that sum to 1 loses at most |gamma| (K - 1).
docs/mathematics.md, section `clipped_softmax`. Axes: B batch, H head, Q query, K key, E model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.call import NORMALIZED
from ..measuring.batches import Batch, as_batches, evaluating, forward, read_by, token_mask
from ..measuring.instrumented import instrumented
from ..patch import need_installation
from ..text.bar import bar

GAMMAS = tuple(-digit * 10.0**power for power in (-1, -2, -3, -4, -5, -6) for digit in (5, 2, 1))
SHARE = 0.01


@dataclass
class Share:
    """A part of the attention, summed over batches.

    Attributes:
        part: the sum of the part.
        whole: the sum of all weights.
    """

    part: float = 0.0
    whole: float = 0.0

    def add(self, part_BHQK: Tensor, weights_BHQK: Tensor, batch: Batch) -> None:
        """Add the rows of the queries that are real tokens of the batch.

        Raises:
            ValueError: the mask of the batch does not say which queries are real.
        """
        real = token_mask(batch, weights_BHQK.transpose(1, 2))
        self.part += _total(part_BHQK, real)
        self.whole += _total(weights_BHQK, real)

    @property
    def value(self) -> float:
        """The part divided by the whole; 0 without any attention."""
        return self.part / self.whole if self.whole else 0.0


def _total(weights_BHQK: Tensor, real_BQ: Tensor) -> float:
    """The sum of the rows of the real queries. A row is summed in the dtype of the weights, the rows in fp64."""
    rows = weights_BHQK.detach().sum(-1).transpose(1, 2)[real_BQ]
    return float(rows.cpu().double().sum())  # in this order: some devices (Apple's) have no fp64


def cut_shares(
    model: nn.Module, batches: Iterable[Any], gammas: Sequence[float], *, progress: bool = True
) -> dict[int, tuple[float, ...]]:
    """Measure which share of the attention each gamma would cut away, with zeta = 1. The model does not change.

    Args:
        model: a stock model or a patched model. What counts are the weights before any clip, as the model runs now.
        batches: dicts of tensors as the model takes them. They are read once. Where there is padding, a 2-D attention
            mask (B,L) marks the real tokens.
        gammas: numbers of at most 0.
        progress: show a progress bar.

    Returns:
        One share per gamma, in [0, 1], by the layer's number. Layers without weights (`simpletron*`) are left out.

    Raises:
        ValueError: a gamma is above 0, there is no batch, nothing in the model can be swapped, or a mask does not say
            which tokens are real.
    """
    if wrong := [gamma for gamma in gammas if not gamma <= 0]:
        raise ValueError(f"gamma must be at most 0, got {wrong}.")
    with evaluating(model), instrumented(model) as root:
        counted = {layer: _Counted(gammas) for layer in need_installation(root).layers()}
        for batch in bar(as_batches(batches), desc="measure", unit="batch", shown=progress):
            with contextlib.ExitStack() as hooked:
                for layer, each in counted.items():
                    hook = each.hook(read_by(layer.site.core, batch))
                    for swap in layer.copies:  # PEFT runs one of them
                        hooked.callback(swap.register_forward_pre_hook(hook).remove)
                forward(model, batch)
    return {layer.number: tuple(share.value for share in each.shares) for layer, each in counted.items() if each.seen}


class _Counted:
    """The shares of one layer, one per gamma."""

    def __init__(self, gammas: Sequence[float]) -> None:
        self.gammas = gammas
        self.shares = [Share() for _ in gammas]
        self.seen = False

    def hook(self, batch: Batch) -> Any:
        """A forward pre-hook of a swap, which counts the weights of one call."""

        def watch(module: nn.Module, args: tuple[Any, ...]) -> None:
            def see(place: str, tensor: Tensor) -> Tensor:
                if place == NORMALIZED:
                    self.seen = True
                    for gamma, share in zip(self.gammas, self.shares, strict=True):
                        share.add(torch.minimum(tensor, -gamma * (1 - tensor)), tensor, batch)
                return tensor

            args[1].probe = see

        return watch


def choose_gamma(model: nn.Module, batches: Iterable[Any], *, share: float = SHARE, progress: bool = True) -> float:
    """Choose the gamma that is farthest from 0 among `GAMMAS` and cuts at most a share of the attention of any layer.

    Give the result to `patch_model(model, "clipped_softmax", gamma=...)`.

    Args:
        model: as in `cut_shares`. For a composition such as "outeffhop+clipped_softmax", patch the other variant first.
        batches: as in `cut_shares`. The weights get smaller as rows get longer, so use the length of your task.
        share: the largest share, between 0 and 1.
        progress: show a progress bar.

    Returns:
        The gamma; 0.0, which cuts nothing, if every gamma of `GAMMAS` cuts more.

    Raises:
        ValueError: `share` does not lie between 0 and 1, the model has no layer with attention weights, or as in
            `cut_shares`.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, got {share!r}.")
    found = cut_shares(model, batches, GAMMAS, progress=progress)
    if not found:
        raise ValueError("no layer has attention weights, so there is nothing to clip.")
    largest = [max(shares) for shares in zip(*found.values(), strict=True)]
    return next((gamma for gamma, each in zip(GAMMAS, largest, strict=True) if each <= share), 0.0)
