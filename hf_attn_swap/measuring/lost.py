"""How much a model lost by its swap: its outputs beside those of the stock model, on the same rows.

KL is sum p* log(p* / p) with the stock model's distribution p*, in nats per token (per row for a classifier). Agreement
is the share of tokens (rows) whose likeliest class is the stock model's. Perplexity is exp of the mean loss of the next
token. The relative error is ||h - h*||^2 / ||h*||^2 of the last hidden states, as a mean over rows.

A mean over all positions hides what a model that was converted on short rows loses behind them. So the loss of the next
token also stands by its position, the number of tokens before it in its row. The first bin has up to 63 tokens before,
and each further bin is twice as wide.
Axes: B batch, L token, N predicted token or row, E model width, V vocabulary or class.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..patch import need_installation
from ..text.bar import bar
from ..text.table import Table
from ..wiring.install import Installation, model_root
from .batches import Batch, as_batches, evaluating, forward, gives_numbers, read_by_decoder, token_mask
from .divergence import kl, relative_error

PIECE = 2**22  # numbers of logits that are compared at a time
Z95 = 1.96  # 95 % of a normal distribution lie within so many standard deviations
UNKNOWN = -100  # instead of a class: no label, or no next token
LARGEST_EXPONENT = 709.0  # e to a larger power is no float any more


@dataclass(frozen=True, kw_only=True)
class Lost:
    """What a swap cost on some rows. A figure is None where the model has no such output.

    Attributes:
        tokens: the number of real tokens (of rows for a classifier) that were compared.
        divergence: KL to the stock model, in nats per token.
        agreement: the share of tokens whose likeliest class is the stock model's, from 0 to 1.
        perplexity: of the next token, after the swap; causal language models only.
        stock_perplexity: the same for the stock model.
        relative_error: of the last hidden states, for models without logits; of the outputs, for a regression or for
            labels that do not exclude each other.
        accuracy: the share of rows whose likeliest class is the label; classifiers on rows with labels only.
        stock_accuracy: the same for the stock model.
        accuracy_margin: half of the 95 % interval of the difference of the two accuracies on the same rows (Agresti and
            Min, 2005, with half a row added to each of the four outcomes of a row). The spread of seeds is not in it.
        correlation: Spearman's rank correlation of the output with the label; regressions of one number on rows with
            labels only.
        stock_correlation: the same for the stock model.
        correlation_margin: half of the 95 % interval of the difference of the two correlations, by a bootstrap of rows.
        per_token: True if a prediction belongs to a token, False if it belongs to a row.
        recall: what a passage gains when it is read again, in nats per token (`measuring/recall.py`); causal language
            models only, and only where it was asked for.
        stock_recall: the same for the stock model.
        recall_distance: the number of tokens between the two readings.
        by_position: the loss of the next token in both models, by the number of tokens before it; causal language
            models only, and empty elsewhere.
    """

    tokens: int
    divergence: float | None = None
    agreement: float | None = None
    perplexity: float | None = None
    stock_perplexity: float | None = None
    relative_error: float | None = None
    accuracy: float | None = None
    stock_accuracy: float | None = None
    accuracy_margin: float | None = None
    correlation: float | None = None
    stock_correlation: float | None = None
    correlation_margin: float | None = None
    per_token: bool = True
    recall: float | None = None
    stock_recall: float | None = None
    recall_distance: int | None = None
    by_position: tuple[Bin, ...] = ()

    @property
    def degradation(self) -> float:
        """What was lost as one number, in the model's own terms; 0 is nothing.

        With labels: the accuracy that was lost, as a share of all rows; for a regression the rank correlation that was
        lost. A causal language model: the rise of perplexity, as a share of the stock model's. Another model of tokens:
        KL, in nats. A classifier: the share of rows whose first choice changed. A model without logits, or with outputs
        that are numbers: the relative squared error.
        """
        return self._measured[1]

    @property
    def divergence_or_error(self) -> float:
        """KL, or the relative error: every change of the model moves this number, so two states can be compared."""
        figure = self.relative_error if self.divergence is None else self.divergence
        return self.degradation if figure is None else figure

    @property
    def measure(self) -> str:
        """What `degradation` counts, in words."""
        return self._measured[0]

    @property
    def _measured(self) -> tuple[str, float]:
        """What was lost, in words and as a number."""
        if self.accuracy is not None and self.stock_accuracy is not None:
            return "accuracy lost", self.stock_accuracy - self.accuracy
        if self.correlation is not None and self.stock_correlation is not None:
            return "rank correlation lost", self.stock_correlation - self.correlation
        if self.ratio is not None:
            return "perplexity above the stock model's", self.ratio - 1
        if self.relative_error is not None:
            return "relative squared error of the outputs", self.relative_error
        if self.per_token:  # JSON has no NaN, so a file has null in its place
            return "KL to the stock model, nats", math.nan if self.divergence is None else self.divergence
        return "rows with another first choice", math.nan if self.agreement is None else 1 - self.agreement

    @property
    def ratio(self) -> float | None:
        """The perplexity divided by the stock model's."""
        if self.perplexity is None or self.stock_perplexity is None:
            return None
        return self.perplexity / self.stock_perplexity

    @property
    def recall_share(self) -> float | None:
        """The recall as a share of the stock model's; NaN if the stock model recalls nothing."""
        if self.recall is None or self.stock_recall is None:
            return None
        return self.recall / self.stock_recall if self.stock_recall > 0 else math.nan

    def within(self, max_loss: float | None, min_recall: float | None) -> bool:
        """True if `degradation` is at most `max_loss`, and `recall_share` at least `min_recall`; None is no budget."""
        if min_recall is not None and not (self.recall_share is not None and self.recall_share >= min_recall):
            return False
        return max_loss is None or self.degradation <= max_loss

    def rows(self) -> Iterator[tuple[str, str]]:
        """The name and the text of every figure that exists."""
        if self.accuracy is not None and self.stock_accuracy is not None:
            yield "Accuracy (the stock model's)", f"{self.accuracy:.1%} ({self.stock_accuracy:.1%})"
            if self.accuracy_margin is not None:
                gained = 100 * (self.accuracy - self.stock_accuracy)
                yield "Difference of accuracy, points", f"{gained:+.1f} ± {100 * self.accuracy_margin:.1f} (95 %)"
        if self.correlation is not None and self.stock_correlation is not None:
            yield "Rank correlation (the stock model's)", f"{self.correlation:.4f} ({self.stock_correlation:.4f})"
            if self.correlation_margin is not None:
                gained = self.correlation - self.stock_correlation
                yield "Difference of the rank correlation", f"{gained:+.4f} ± {self.correlation_margin:.4f} (95 %)"
        if self.perplexity is not None and self.stock_perplexity is not None:
            words = (
                f"{self.perplexity:.4g} ({self.perplexity / self.stock_perplexity:.3f} x {self.stock_perplexity:.4g})"
            )
            yield "Perplexity (ratio to the stock model's)", words
        if self.divergence is not None:
            yield "KL to the stock model, nats per prediction (0 is no loss)", f"{self.divergence:.3g}"
        if self.agreement is not None:
            yield "Same first choice as the stock model", f"{self.agreement:.1%}"
        if self.relative_error is not None:
            yield "Relative squared error of the outputs (0 is no loss)", f"{self.relative_error:.3g}"
        if self.recall is not None and self.stock_recall is not None:
            words = f"Recall after {self.recall_distance:,} tokens, nats per token (the stock model's)"
            yield words, f"{self.recall:.3g} ({self.stock_recall:.3g})"

    def __str__(self) -> str:
        return "\n".join(f"{words}: {value}" for words, value in self.rows())

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Lost:
        """The figures from their plain data, also after JSON."""
        bins = tuple(Bin(**fields) for fields in values.get("by_position", ()))
        return cls(**{**values, "by_position": bins})


@torch.no_grad()
def lost(model: nn.Module, batches: Iterable[Any], *, stock: nn.Module | None = None, progress: bool = False) -> Lost:
    """Compare a model with the stock model on the same rows, in evaluation mode.

    Args:
        model: a patched model.
        batches: dicts of tensors as the model takes them; labels are not read.
        stock: the stock model. None takes `model` at strength 0, which is the stock model as long as no weight has
            changed since the swap.
        progress: show a progress bar.

    Raises:
        ValueError: `stock` is None and the model is not patched, was changed by a conversion;
            or there are no batches.
    """
    if stock is None:
        installation = need_installation(model)
        refuse_changed(installation, "pass stock=")
        as_stock: Callable[[], AbstractContextManager[None]] = installation.stock
    else:
        as_stock = contextlib.nullcontext
    sums = Sums(causal=predicts_next(model), numbers=gives_numbers(model))
    with evaluating(model, stock):
        for batch in bar(as_batches(batches), desc="compare", unit="batch", shown=progress):
            with as_stock():
                theirs = forward(stock or model, batch)
            sums.add(forward(model, batch), theirs, batch)
    return sums.result()


def refuse_changed(installation: Installation, advice: str) -> None:
    """Refuse a model whose strength 0 is no longer the stock model, and say what to do.

    Raises:
        ValueError: a conversion changed weights.
    """
    if any(layer.swap.retrained for layer in installation.layers()):
        raise ValueError(
            f"a conversion changed weights of this model, so strength 0 is no longer the stock model; {advice}."
        )


def predicts_next(model: nn.Module) -> bool:
    """True for a causal language model, whose logits are of the next token."""
    return type(model_root(model)).__name__.endswith(("ForCausalLM", "LMHeadModel"))


class Sums:
    """Sums over tokens, from which the figures are made.

    Args:
        causal: the logits are of the next token.
        numbers: the outputs of a row are compared as numbers, and not as logits of classes.
    """

    def __init__(self, *, causal: bool, numbers: bool) -> None:
        self.causal = causal
        self.numbers = numbers
        self.tokens = self.targets = 0
        self.agreeing = self.divergence = self.loss = self.stock_loss = 0.0
        self.errors: list[float] = []
        self.square_error = self.square = 0.0
        self.numbers_N: list[tuple[Tensor, Tensor, Tensor]] = []  # ours, the stock model's, the labels
        self.right = self.stock_right = self.discordant = self.labelled = 0
        self.positions = PositionSums()
        self.logits = False
        self.per_token = True

    def add(self, ours: Any, theirs: Any, batch: Batch, labels_B: Tensor | None = None) -> None:
        """Add the outputs of one batch.

        Raises:
            ValueError: the two models give logits of different sizes.
        """
        batch = read_by_decoder(batch)
        sizes = [
            tuple(output.logits.shape)
            for output in (ours, theirs)
            if isinstance(getattr(output, "logits", None), Tensor)
        ]
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the models give logits of {sizes[0][-1]} and {sizes[1][-1]} numbers ({sizes[0]} and {sizes[1]}), so "
                "they cannot be compared."
            )
        if not isinstance(getattr(ours, "logits", None), Tensor):
            mine, stock = (output[0] if output[0].dim() > 2 else output[0][..., None] for output in (ours, theirs))
            self.add_errors(mine, stock, token_mask(batch, mine))  # question answering gives one number per token
        elif self.numbers:
            self.add_numbers(ours.logits.float(), theirs.logits.float(), labels_B)
        else:
            self.add_logits(ours.logits, theirs.logits, batch, labels_B)

    def add_errors(self, ours_BLE: Tensor, theirs_BLE: Tensor, real_BL: Tensor) -> None:
        """Add outputs that are compared as numbers."""
        error = float(relative_error(ours_BLE, theirs_BLE.to(ours_BLE.device), real_BL))
        self.errors.append(error * len(real_BL))
        self.tokens += len(real_BL)

    def add_numbers(self, ours_BN: Tensor, theirs_BN: Tensor, labels_B: Tensor | None = None) -> None:
        """Add outputs of rows that are no logits of classes. One of them may be 0, so the squares are summed first."""
        theirs_BN = theirs_BN.to(ours_BN.device)
        self.square_error += float((ours_BN - theirs_BN).square().sum())
        self.square += float(theirs_BN.square().sum())
        self.tokens += len(ours_BN)
        if labels_B is not None and ours_BN.shape[-1] == 1:
            self.numbers_N.append((ours_BN[:, 0].cpu(), theirs_BN[:, 0].cpu(), labels_B.float().cpu()))

    def add_logits(self, ours: Tensor, theirs: Tensor, batch: Batch, labels_B: Tensor | None) -> None:
        """Add logits (B,L,V) of tokens or (B,V) of rows, a piece at a time: those of a large vocabulary are large."""
        self.logits = True
        self.per_token = ours.dim() == 3
        real = token_mask(batch, ours) if self.per_token else torch.ones(ours.shape[:1], dtype=torch.bool)
        real_N = real.to(ours.device).flatten()
        target_N = self._targets(ours, real_N, batch, labels_B)
        before_N = real_N.view(ours.shape[:-1]).cumsum(-1).flatten()  # a token's logits are of the one behind it
        ours_NV, theirs_NV = ours.flatten(0, -2), theirs.flatten(0, -2)
        size = max(1, PIECE // ours.shape[-1])
        for first in range(0, len(ours_NV), size):
            piece = slice(first, first + size)
            theirs_V = theirs_NV[piece].to(ours.device)  # the stock model may be on another device
            self._add_piece(ours_NV[piece].float(), theirs_V.float(), real_N[piece], target_N[piece], before_N[piece])

    def _targets(self, ours: Tensor, real_N: Tensor, batch: Batch, labels_B: Tensor | None) -> Tensor:
        """The class that each prediction is compared with: a row's label or the next token; UNKNOWN without one."""
        if labels_B is not None and not self.per_token:
            return labels_B.to(ours.device)
        target_BL = torch.full(ours.shape[:-1], UNKNOWN, device=ours.device)
        if self.causal and "input_ids" in batch:
            real_BL = real_N.view(target_BL.shape)
            both = real_BL[:, :-1] & real_BL[:, 1:]
            target_BL[:, :-1][both] = batch["input_ids"].to(ours.device)[:, 1:][both]
        return target_BL.flatten()

    def _add_piece(self, mine_NV: Tensor, stock_NV: Tensor, real_N: Tensor, target_N: Tensor, before_N: Tensor) -> None:
        """Add some predictions."""
        self.tokens += int(real_N.sum())
        log_p_NV, log_target_NV = mine_NV.log_softmax(-1), stock_NV.log_softmax(-1)
        self.divergence += float((kl(log_p_NV, log_target_NV.exp(), log_target_NV) * real_N.float()).sum())
        mine_N, stock_N = mine_NV.argmax(-1), stock_NV.argmax(-1)
        self.agreeing += float((mine_N == stock_N)[real_N].sum())
        count = int((target_N != UNKNOWN).sum())
        if not self.per_token:
            self.labelled += count
            right_N, stock_right_N = mine_N == target_N, stock_N == target_N
            self.right += int(right_N.sum())
            self.stock_right += int(stock_right_N.sum())
            self.discordant += int((right_N != stock_right_N).sum())
        elif count:
            self.targets += count
            known_N = target_N != UNKNOWN
            target_N1 = target_N.clamp_min(0)[:, None]
            mine_N, stock_N = (-log_NV.gather(-1, target_N1)[known_N, 0] for log_NV in (log_p_NV, log_target_NV))
            self.loss += float(mine_N.sum())
            self.stock_loss += float(stock_N.sum())
            self.positions.add(before_N[known_N], mine_N, stock_N)

    def result(self) -> Lost:
        """The figures of all batches so far."""
        if self.numbers:
            return self._of_numbers()
        if not self.logits:
            return Lost(tokens=self.tokens, relative_error=sum(self.errors) / self.tokens)
        mean = self.divergence / self.tokens
        mean = 0.0 if mean < 0 else mean  # only rounding makes it negative
        figures: dict[str, Any] = {"divergence": mean, "agreement": self.agreeing / self.tokens}
        if self.labelled:
            figures |= {"accuracy": self.right / self.labelled, "stock_accuracy": self.stock_right / self.labelled}
            count = self.labelled + 2
            square = self.discordant + 1 - (self.right - self.stock_right) ** 2 / count
            figures |= {"accuracy_margin": Z95 * math.sqrt(square) / count}
        if self.targets:
            figures |= {"perplexity": _exp(self.loss / self.targets)}
            figures |= {"stock_perplexity": _exp(self.stock_loss / self.targets), "by_position": self.positions.bins()}
        return Lost(tokens=self.tokens, per_token=self.per_token, **figures)

    def _of_numbers(self) -> Lost:
        """The relative error, and the rank correlations with the labels if every row has one and not all are equal."""
        figures = Lost(tokens=self.tokens, relative_error=self.square_error / max(self.square, sys.float_info.min))
        if not self.numbers_N or self.tokens < 2:
            return figures
        ours_N, theirs_N, truth_N = map(torch.cat, zip(*self.numbers_N, strict=True))
        if len(truth_N) != self.tokens or not truth_N.isfinite().all() or bool((truth_N == truth_N[0]).all()):
            return figures
        return replace(
            figures,
            correlation=rank_correlation(ours_N, truth_N),
            stock_correlation=rank_correlation(theirs_N, truth_N),
            correlation_margin=difference_margin(ours_N, theirs_N, truth_N),
        )


def _exp(exponent: float) -> float:
    """E to this power, or to the largest power that is a float. NaN stays NaN."""
    return math.exp(min(exponent, LARGEST_EXPONENT))


FIRST_BIN = 64  # the end of the first bin
BINS = 25  # bins, so that the last one ends behind a billion tokens


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
        self.sums = torch.zeros(3, BINS, dtype=torch.float64)  # tokens, the model's losses, the stock model's

    def add(self, before_N: Tensor, ours_N: Tensor, theirs_N: Tensor) -> None:
        """Add some predicted tokens: the number of tokens before each, and its loss in both models."""
        ends = torch.tensor([FIRST_BIN * 2**place for place in range(BINS - 1)])
        bin_N = torch.bucketize(before_N.cpu(), ends, right=True)
        for sums, values_N in zip(self.sums, (torch.ones_like(ours_N), ours_N, theirs_N), strict=True):
            sums.index_add_(0, bin_N, values_N.cpu().double())

    def bins(self) -> tuple[Bin, ...]:
        """The bins that have tokens."""
        return tuple(
            Bin(
                first=FIRST_BIN * 2 ** (place - 1) if place else 1,
                last=FIRST_BIN * 2**place - 1,
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


SAMPLES = 1000  # of the bootstrap


def rank_correlation(first_N: Any, second_N: Any) -> float:
    """Spearman's correlation of two lists of numbers, from -1 to 1.

    Returns NaN if a list has a NaN, and otherwise 0 if all numbers of a list are equal.
    """
    from scipy.stats import spearmanr  # slow to import, and most measures do without

    if any(bool((values_N != values_N).any()) for values_N in (first_N, second_N)):
        return math.nan
    if any(bool((values_N == values_N[0]).all()) for values_N in (first_N, second_N)):
        return 0.0
    return float(spearmanr(first_N, second_N).statistic)


def difference_margin(ours_N: Tensor, theirs_N: Tensor, truth_N: Tensor) -> float:
    """Half of the 95 % interval of the difference of two rank correlations with the truth, by a paired bootstrap.

    NaN if a number is not finite.
    """
    from scipy.stats import bootstrap

    samples = ours_N, theirs_N, truth_N
    if not all(bool(sample_N.isfinite().all()) for sample_N in samples):
        return math.nan
    result = bootstrap(
        [sample_N.numpy() for sample_N in samples],
        lambda ours, theirs, truth: rank_correlation(ours, truth) - rank_correlation(theirs, truth),
        n_resamples=SAMPLES,
        vectorized=False,
        paired=True,
        method="percentile",
        rng=0,
    )
    low, high = result.confidence_interval
    return float(high - low) / 2
