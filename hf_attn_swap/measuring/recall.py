"""Measures what a causal language model recalls: how much better it reads a passage when it has read it before.

A text is a passage P of n tokens, d tokens of other text, and P again. The first s tokens of P do not count: from them
a reader finds out that P comes again.

    gain(d) = 1/(n - s) sum_{t = s+1..n} [ln p(x_t | P, other text, x_<t) - ln p(x_t | x_<t)],   x = P

The gain is in nats per token, and 0 for a model that recalls nothing. The measure is this package's own, after copying
as a test of memory (Jelassi et al., 2024, "Repeat After Me"); docs/mathematics.md, section Diagnostics.
Axes: N passage (text), L token, T counted token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from ..text.bar import bar
from ..text.table import Table, Tabled
from ..wiring.install import model_root
from .batches import evaluating, forward, max_positions
from .lm_head import can_skip_logits
from .lost import predicts_next

DISTANCES = (64, 200, 512, 2048)
LENGTH = 96  # tokens of a passage
PASSAGES = 8
SKIPPED = 9  # first tokens of a passage, which do not count
AT_ONCE = 1024  # tokens of a batch, if a text is not longer


@dataclass(frozen=True, kw_only=True)
class Recall(Tabled):
    """What a model recalls.

    Attributes:
        gains: by the distance in tokens, the gain of each passage, in nats per token.
    """

    gains: dict[int, tuple[float, ...]]

    def mean(self, distance: int) -> float:
        """The mean gain over the passages, in nats per token."""
        return fmean(self.gains[distance])

    def spread(self, distance: int) -> float:
        """The standard deviation of the gain over the passages, in nats per token; 0 for a single passage."""
        gains = self.gains[distance]
        return stdev(gains) if len(gains) > 1 else 0.0

    def table(self) -> Table:
        """A row per distance."""
        rows = [
            (f"{distance:,}", f"{self.mean(distance):.3f}", f"{self.spread(distance):.3f}") for distance in self.gains
        ]
        summary = "What a passage gains when it is read again, in nats per token (0: nothing is recalled)."
        return Table(summary=summary, header=("tokens between", "gain", "spread over passages"), rows=rows)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, by the distance as a text."""
        return {
            str(distance): {"gain": self.mean(distance), "spread": self.spread(distance), "passages": len(gains)}
            for distance, gains in self.gains.items()
        }


@dataclass(frozen=True)
class Passages:
    """Texts that hold a passage twice.

    Attributes:
        texts: by the distance, token ids (N,L) with L = 2 `length` + distance.
        length: the number of tokens of a passage.
    """

    texts: dict[int, Tensor]
    length: int

    @classmethod
    def of(
        cls,
        model: nn.Module,
        rows: Iterable[Any],
        distances: Sequence[int] = DISTANCES,
        *,
        passages: int = PASSAGES,
        length: int = LENGTH,
    ) -> Passages:
        """Make the texts from the rows of a user; the arguments and errors are those of `recall`."""
        need_next_token(model, "recall is measured")
        if passages < 1 or length <= SKIPPED or min(distances, default=0) < 1:
            raise ValueError(
                f"recall takes at least one passage of more than {SKIPPED} tokens and distances of at least 1, got "
                f"{passages} passages of {length} tokens and the distances {tuple(distances)}."
            )
        stream_L = token_stream(rows)
        limit = max_positions(model)
        room = len(stream_L) if limit is None else min(len(stream_L), limit - length)
        longest = room - length
        positions = "no bound on positions" if limit is None else f"{limit} positions"
        if not (possible := [distance for distance in distances if distance <= longest]):
            raise ValueError(
                f"a passage of {length} tokens and {min(distances)} tokens after it do not fit: the rows have "
                f"{len(stream_L):,} tokens together, and the model has {positions}; bring more text, or measure "
                "smaller distances."
            )
        places = [place * len(stream_L) // passages for place in range(passages)]
        texts = {
            distance: torch.stack([_text(stream_L, place, length, distance) for place in places])
            for distance in possible
        }
        return cls(texts, length)

    def subset(self, count: int) -> tuple[Passages, list[int]]:
        """At most so many of the passages, evenly spaced, and their places among all."""
        total = len(next(iter(self.texts.values())))
        places = [place * total // min(count, total) for place in range(min(count, total))]
        texts = {distance: texts_NL[places] for distance, texts_NL in self.texts.items()}
        return Passages(texts, self.length), places

    def measure(self, model: nn.Module, *, progress: bool = False) -> Recall:
        """Let a model read the texts, in evaluation mode."""
        gains = {}
        with evaluating(model):
            for distance, texts_NL in bar(self.texts.items(), desc="recall", shown=progress, leave=False):
                gains[distance] = tuple(self._gains(model, texts_NL))
        return Recall(gains=gains)

    def _gains(self, model: nn.Module, texts_NL: Tensor) -> Iterator[float]:
        """The gain of every passage."""
        width = texts_NL.shape[1]
        first_T = torch.arange(SKIPPED, self.length)
        both_T = torch.cat([first_T, first_T + width - self.length])
        for batch_NL in torch.split(texts_NL, max(1, AT_ONCE // width)):
            log_p_NT, _ = token_log_probs(model, batch_NL, both_T)
            once_NT, again_NT = log_p_NT.chunk(2, 1)
            yield from (again_NT - once_NT).mean(1).tolist()


def recall(
    model: nn.Module,
    rows: Iterable[Any],
    *,
    distances: Sequence[int] = DISTANCES,
    passages: int = PASSAGES,
    length: int = LENGTH,
    progress: bool = False,
) -> Recall:
    """Measure what a causal language model recalls, by distance. The model does not change.

        gains = recall(model, tokenizer(texts)["input_ids"])

    The rows are joined. The passages start at equal distances in the joined text, and the other text is the middle of
    what remains around a passage. So all models that read the same tokens read the same passages.

    Args:
        model: a causal language model, stock or swapped.
        rows: token ids: lists, tensors (L,) or (B,L), or dicts that hold them as `input_ids`, with or without an
            `attention_mask`; padding that a mask marks is left out. The held-out rows of a conversion are such rows.
        distances: the numbers of tokens between the two readings. A distance that is too long for the rows (`length`
            + distance tokens in all) or for the model's positions (2 `length` + distance) is left out.
        passages: the number of passages.
        length: the number of tokens of a passage; the first 9 of them do not count.
        progress: show a progress bar.

    Returns:
        The gain of every passage in nats per token, by distance.

    Raises:
        ValueError: the model is no causal language model, a number is out of range, the rows hold no token ids, or no
            distance is short enough.
    """
    return Passages.of(model, rows, distances, passages=passages, length=length).measure(model, progress=progress)


def token_stream(rows: Iterable[Any]) -> Tensor:
    """All real tokens, one after another.

    Raises:
        ValueError: a row holds no token ids, or there is no row.
    """
    pieces = []
    for row in [rows] if isinstance(rows, Mapping) else rows:
        values: Any = row.get("input_ids") if isinstance(row, Mapping) else row
        try:
            ids: Tensor | None = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError):
            ids = None
        if ids is None or (ids.is_floating_point() and ids.numel()):
            raise ValueError(f"a row is token ids, or a dict with input_ids, got {type(row).__name__}.")
        mask = row.get("attention_mask") if isinstance(row, Mapping) else None
        pieces.append(ids.flatten() if mask is None else ids[torch.as_tensor(mask).bool()])
    if not pieces:
        raise ValueError("there are no rows, so there is no text to measure on.")
    return torch.cat([ids.cpu().long() for ids in pieces])


def _text(stream_L: Tensor, place: int, length: int, distance: int) -> Tensor:
    """The passage at a place, other text, and the passage again; behind its end, the stream begins again."""
    around_L = stream_L.roll(-place)
    passage_L, rest_L = around_L[:length], around_L[length:]
    start = (len(rest_L) - distance) // 2
    return torch.cat([passage_L, rest_L[start : start + distance], passage_L])


def need_next_token(model: nn.Module, what: str) -> None:
    """Refuse a model that is no causal language model.

    Args:
        model: the model.
        what: what is measured by the next token, with its verb: "recall is measured".

    Raises:
        ValueError: it is none.
    """
    if not predicts_next(model):
        raise ValueError(f"{what} by the next token; {type(model_root(model)).__name__} is no causal language model.")


def token_log_probs(model: nn.Module, texts_NL: Tensor, places_T: Tensor) -> tuple[Tensor, Tensor]:
    """Let a model read texts to their end, and ask for the tokens at some places, each given all tokens before it.

    Args:
        model: a causal language model.
        texts_NL: token ids.
        places_T: the places of the tokens, from 1; the first token of a text has nothing before it.

    Returns:
        The log-probability of each token (N,T), in nats, and whether it is the model's first choice (N,T), on the CPU.
    """
    before_T = places_T - 1  # a token's logits stand one place before it
    leaves_out = can_skip_logits(model_root(model))
    batch = {"input_ids": texts_NL, **({"logits_to_keep": before_T} if leaves_out else {})}
    logits_NTV = forward(model, batch).logits
    if not leaves_out:
        logits_NTV = logits_NTV[:, before_T.to(logits_NTV.device)]
    token_NT = texts_NL[:, places_T].to(logits_NTV.device)
    log_p_NT = logits_NTV.float().log_softmax(-1).gather(-1, token_NT[..., None])[..., 0]
    return log_p_NT.cpu(), torch.eq(logits_NTV.argmax(-1), token_NT).cpu()
