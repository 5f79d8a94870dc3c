"""The loss of the next token by its position: by the number of tokens that stand before it in its row.

    loss(a, b) = mean of -ln p(x_t | x_<t) over a <= t <= b,   t counted from 0

A model that was converted on short rows may lose more behind them, and a mean over all positions hides it. The first
bin has up to 63 tokens before, and each further bin is twice as wide.
Axes: N predicted token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..text.table import Table
from ..wiring.install import model_root
from .batches import Batch

FIRST = 64  # the end of the first bin
COUNT = 25  # bins, so that the last one ends behind a billion tokens


@dataclass(frozen=True, kw_only=True)
class Bin:
    """The loss at some positions.

    Attributes:
        first, last: the least and the greatest number of tokens before the predicted one.
        tokens: the number of predicted tokens.
        loss: the mean loss of the model, in nats per token.
        stock_loss: the same for the stock model.
    """

    first: int
    last: int
    tokens: int
    loss: float
    stock_loss: float


class PositionSums:
    """Sums of the losses of two models, by bin."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3, COUNT, dtype=torch.float64)  # tokens, the model's losses, the stock model's

    def add(self, before_N: Tensor, ours_N: Tensor, theirs_N: Tensor) -> None:
        """Add some predicted tokens: the number of tokens before each, and its loss in both models."""
        ends = torch.tensor([FIRST * 2**place for place in range(COUNT - 1)])
        bin_N = torch.bucketize(before_N.cpu(), ends, right=True)
        for sums, values_N in zip(self.sums, (torch.ones_like(ours_N), ours_N, theirs_N), strict=True):
            sums.index_add_(0, bin_N, values_N.cpu().double())

    def bins(self) -> tuple[Bin, ...]:
        """The bins that have tokens."""
        return tuple(
            Bin(
                first=FIRST * 2 ** (place - 1) if place else 1,
                last=FIRST * 2**place - 1,
                tokens=round(tokens),
                loss=ours / tokens,
                stock_loss=theirs / tokens,
            )
            for place, (tokens, ours, theirs) in enumerate(self.sums.T.tolist())
            if tokens
        )


def position_table(bins: Sequence[Bin], names: tuple[str, str]) -> Table:
    """A row per bin.

    Args:
        bins: of two models.
        names: the name of the stock model, and of the model beside it.
    """
    rows = [
        (
            f"{losses.first:,}-{losses.last:,}",
            f"{losses.stock_loss:.3f}",
            f"{losses.loss:.3f}",
            f"{losses.loss - losses.stock_loss:+.3f}",
            f"{losses.tokens:,}",
        )
        for losses in bins
    ]
    summary = "Loss by position, in nats per token: the first column is the number of tokens before the predicted one."
    return Table(summary=summary, header=("tokens before", *names, "difference", "predicted"), rows=rows)


def max_positions(model: nn.Module) -> int | None:
    """The number of positions that a model of text was made for, as its config says; None if it names none."""
    positions = getattr(model_root(model).config.get_text_config(), "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


def usual_length(models: Iterable[nn.Module], length: int) -> int:
    """This number of tokens, or the positions of the model that has the fewest, if they are fewer."""
    limits = [limit for model in models if (limit := max_positions(model)) is not None]
    return min([length, *limits])


def check_length(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Refuse rows that are longer than the model's positions: what a model gives behind them says nothing.

    Raises:
        ValueError: they are.
    """
    longest = max((batch["input_ids"].shape[-1] for batch in batches if "input_ids" in batch), default=0)
    limit = max_positions(model)
    if limit is not None and longest > limit:
        raise ValueError(
            f"the rows have up to {longest:,} tokens, and {type(model_root(model)).__name__} was made for {limit:,} "
            "positions; what it gives behind them says nothing, so measure shorter rows."
        )
