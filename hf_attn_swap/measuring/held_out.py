"""Held-out rows on which a conversion is measured again and again, beside what the stock model gives on them.

The stock model runs once. Of a large vocabulary, its last hidden states are kept in place of its logits, as long as the
logits are the head's output on them. The head of the stock model must then not change, or a copy of it is kept.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..text.bar import bar
from ..wiring.install import installation_of, model_root
from .batches import LABELS, Batch, check_batch, evaluating, forward, gives_numbers, without_labels
from .lm_head import last_hidden
from .lost import Lost, Sums, predicts_next, refuse_changed
from .recall import Passages

FEW = 1024  # logits of so few classes are kept as they are
MOST = 2**28  # bytes of the stock model's logits that a small subset of rows keeps; above, the head computes them again


@dataclass
class _Kept:
    """One batch, its labels (B,) or None, and the stock model's outputs: hidden states, logits or the first output."""

    batch: Batch
    labels: Tensor | None
    hidden: Tensor | None = None
    logits: Tensor | None = None
    output: Tensor | None = None

    def first(self, count: int) -> _Kept:
        """The first rows."""
        whole = next(tensor for tensor in (self.hidden, self.logits, self.output) if tensor is not None)

        def cut(value: Any) -> Any:
            rows = isinstance(value, Tensor) and value.dim() > 0 and len(value) == len(whole)
            return value[:count] if rows else value

        batch = {name: cut(value) for name, value in self.batch.items()}
        return _Kept(batch, *map(cut, (self.labels, self.hidden, self.logits, self.output)))


@dataclass
class _Output:
    """An output as `Sums` reads it."""

    logits: Tensor | None
    first: Tensor | None = None

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0
        assert self.first is not None
        return self.first


class HeldOut:
    """Measures how much a model lost, on the same rows each time.

    Args:
        model: the model that others are measured against; a patched model counts at strength 0, unless `as_it_is`.
        batches: dicts of tensors as the model takes them, with or without labels.
        head_trains: True if the head of the stock model will change; a copy of it then computes the logits.
        as_it_is: measure against the model as it is, with its swaps if it has some.
        passages: texts of one distance, on which recall is measured as well.
        progress: show a progress bar.

    Raises:
        ValueError: there is no batch, a batch is no dict of tensors, or strength 0 is no longer the stock model.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Iterable[Any],
        *,
        head_trains: bool = False,
        as_it_is: bool = False,
        passages: Passages | None = None,
        progress: bool = True,
    ) -> None:
        self.kept: list[_Kept] = []
        self.causal = predicts_next(model)
        self.numbers = gives_numbers(model)
        self.passages = passages
        root = model_root(model)
        self.head: nn.Module | None = root.get_output_embeddings()
        if head_trains and self.head is not None:
            self.head = copy.deepcopy(self.head).requires_grad_(False)
        installation = None if as_it_is else installation_of(root)
        if installation is not None:
            refuse_changed(installation, "make HeldOut of the stock model, or say as_it_is=True")
        with evaluating(model), torch.no_grad(), contextlib.ExitStack() as inside:
            if installation is not None:
                inside.enter_context(installation.stock())
            listed = [batches] if isinstance(batches, Mapping) else list(batches)
            for batch in bar(listed, desc="stock model", unit="batch", shown=progress, leave=False):
                self.kept.append(_keep(root, batch, self.head, numbers=self.numbers))
            self.stock_gains = None if passages is None else _gains(passages, model, progress=progress)
        if not self.kept:
            raise ValueError("there are no held-out rows to measure on.")

    def subset(self, batches: int) -> HeldOut:
        """Evenly spaced batches among all of them, for a measurement that is repeated many times."""
        subset = copy.copy(self)
        count = min(max(1, batches), len(self.kept))
        subset.kept = [self.kept[place * len(self.kept) // count] for place in range(count)]
        return subset

    def subset_of_rows(self, rows: int, passages: int) -> HeldOut:
        """At most so many rows and passages, evenly spaced, for a measurement that is repeated very many times."""
        subset = self.subset(rows)
        subset.kept = [kept.first(max(1, rows // len(subset.kept))) for kept in subset.kept]
        subset._keep_logits()
        if self.passages is not None and self.stock_gains is not None:
            subset.passages, places = self.passages.subset(passages)
            subset.stock_gains = [self.stock_gains[place] for place in places]
        return subset

    @torch.no_grad()
    def _keep_logits(self) -> None:
        """Keep the logits that the head gives on hidden states, if they are small enough."""
        size = 0
        for kept in self.kept:
            if kept.hidden is not None:
                logits = self._logits(kept.hidden)
                size += logits.nbytes
                if size > MOST:
                    return
                kept.logits, kept.hidden = logits, None

    @property
    def stock_recall(self) -> float | None:
        """The recall of the model that others are measured against; None without passages."""
        return None if self.stock_gains is None else fmean(self.stock_gains)

    @torch.no_grad()
    def baseline(self) -> Lost:
        """The figures of the model that others are measured against, without another pass; it has lost nothing."""
        sums = Sums(causal=self.causal, numbers=self.numbers)
        for kept in self.kept:
            output = self._output(kept)
            sums.add(output, output, kept.batch, kept.labels)
        return self._with_recall(sums.result(), self.stock_recall)

    @torch.no_grad()
    def lost(self, model: nn.Module, *, progress: bool = False) -> Lost:
        """Compare the model as it is now with the stock model, in evaluation mode."""
        sums = Sums(causal=self.causal, numbers=self.numbers)
        with evaluating(model):
            for kept in bar(self.kept, desc="measure", unit="batch", shown=progress, leave=False):
                sums.add(forward(model, kept.batch), self._output(kept), kept.batch, kept.labels)
        recall = None if self.passages is None else fmean(_gains(self.passages, model, progress=progress))
        return self._with_recall(sums.result(), recall)

    def _with_recall(self, lost: Lost, recall: float | None) -> Lost:
        """The figures with a model's recall, if it was measured."""
        if self.passages is None:
            return lost
        (distance,) = self.passages.texts
        return replace(lost, recall=recall, stock_recall=self.stock_recall, recall_distance=distance)

    def _output(self, kept: _Kept) -> _Output:
        """What the model gave for a batch."""
        return _Output(kept.logits if kept.hidden is None else self._logits(kept.hidden), kept.output)

    def _logits(self, hidden_BLE: Tensor) -> Tensor:
        """What the stock model's head gives. A training may have moved the head to another device."""
        assert self.head is not None
        logits: Tensor = self.head(hidden_BLE.to(next(self.head.parameters()).device))
        return logits


def _gains(passages: Passages, model: nn.Module, *, progress: bool) -> list[float]:
    """The gain of each passage, at their one distance."""
    (distance,) = passages.texts
    return list(passages.measure(model, progress=progress).gains[distance])


def _keep(root: Any, batch: Batch, head: nn.Module | None, *, numbers: bool) -> _Kept:
    """Run the stock model on a batch. With a head that does not change, hidden states may take the logits' place.

    Raises:
        ValueError: the batch is no dict of tensors.
    """
    check_batch(batch)
    labels = next((batch[name] for name in LABELS if isinstance(batch.get(name), Tensor)), None)
    fits = labels is not None and labels.dim() == 1 and (numbers or not labels.is_floating_point())
    rows = labels if fits else None
    kept = _Kept(without_labels(batch), rows)
    with last_hidden(root) as caught:
        output = forward(root, kept.batch)
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        kept.output = output[0]
        return kept
    kept.logits = logits
    if head is not None and caught and logits.shape[-1] > FEW and torch.equal(head(caught[-1]).to(logits), logits):
        kept.logits, kept.hidden = None, caught[-1]
    return kept
