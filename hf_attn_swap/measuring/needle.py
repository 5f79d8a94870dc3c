"""Measures whether a causal language model finds numbers that are hidden in a real text, by length and depth.

A sentence with a number stands at each depth of a text, 0 at its beginning and 1 at its end, each under another name:

    ... The special number of Paris is 48213. ... The special number of Oslo is 90736. ...

At the end the sentences stand again, in another order, and the model is asked for the digits, each given the ones
before it. So one pass asks for all depths. One sentence more is asked for and was never hidden: what the model finds of
it is chance. A number is found if each of its digits is the model's first choice, that is, if the model would write it.

After the test of Kamradt (2023, "Needle in a Haystack"); several numbers in one text are those of RULER (Hsieh et al.,
2024). Axes: L token, T asked token.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from ..text.bar import bar
from ..text.table import Table, Tabled
from ..text.typed import refuse_name
from .batches import evaluating
from .positions import max_positions
from .recall import stream
from .token_log_probs import need_next_token, token_log_probs

LENGTHS = (256, 1024, 4096)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
TEXTS = 4  # of each length
DIGITS = 5
SENTENCE = " The special number of {name} is {number}."
NAMES = ("Paris", "London", "Rome", "Berlin", "Madrid", "Oslo", "Athens", "Dublin", "Prague", "Lisbon", "Warsaw")


@dataclass(frozen=True, kw_only=True)
class Finds:
    """How often a model finds some numbers.

    Attributes:
        numbers: how many numbers were asked for.
        found: the share of the numbers of which the model gives every digit first, from 0 to 1.
        digits: the share of the digits that the model gives first; a guess is right once in ten times. If the tokenizer
            makes one token of several digits, this token counts as a digit, and a guess is right less often.
        log_p: the mean log-probability of a digit, in nats; a guess has -2.3.
    """

    numbers: int
    found: float
    digits: float
    log_p: float

    @classmethod
    def of(cls, numbers: Sequence[tuple[Tensor, Tensor]]) -> Finds:
        """From the log-probability of each digit (T,) of each number, and whether it is the first choice (T,)."""
        return cls(
            numbers=len(numbers),
            found=fmean(bool(first_T.all()) for _, first_T in numbers),
            digits=float(torch.cat([first_T for _, first_T in numbers]).double().mean()),
            log_p=float(torch.cat([log_p_T for log_p_T, _ in numbers]).double().mean()),
        )


@dataclass(frozen=True, kw_only=True)
class Needle(Tabled):
    """The numbers that a model finds.

    Attributes:
        cells: by the length of the text in tokens, and by the depth from 0 to 1.
        together: by the length, over all depths.
        chance: by the length, the numbers that were not in the text.
    """

    cells: dict[int, dict[float, Finds]]
    together: dict[int, Finds]
    chance: dict[int, Finds]

    def table(self) -> Table:
        """A row per depth, a column per length."""
        return needle_table({"": self})

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, by lengths and depths as texts."""
        return {
            str(length): {
                **asdict(self.together[length]),
                "depths": {f"{depth:g}": asdict(finds) for depth, finds in cells.items()},
                "chance": asdict(self.chance[length]),
            }
            for length, cells in self.cells.items()
        }


def needle_table(by_name: Mapping[str, Needle]) -> Table:
    """A row per depth, and a column per length and model.

    Args:
        by_name: what models find in the same texts, by the names of the models.
    """
    each = list(by_name.values())
    lengths = list(each[0].cells)
    rows = [
        (f"{depth:.0%}", *(f"{needle.cells[length][depth].digits:.0%}" for length in lengths for needle in each))
        for depth in next(iter(each[0].cells.values()))
    ]
    for words, kind in (("all", "together"), ("not hidden (chance)", "chance")):
        found = [getattr(needle, kind)[length] for length in lengths for needle in each]
        rows.append((words, *(f"{finds.digits:.0%}" for finds in found)))
    whole = [needle.together[length] for length in lengths for needle in each]
    rows.append(("numbers found", *(f"{round(finds.found * finds.numbers)} of {finds.numbers}" for finds in whole)))
    header = ("depth", *(f"{length:,} {name}".strip() for length in lengths for name in by_name))
    summary = "Digits of hidden numbers that are the model's first choice, by the depth and the tokens of the text."
    return Table(summary=summary, header=header, rows=rows)


@dataclass(frozen=True)
class Hidden:
    """A text with numbers.

    Attributes:
        ids: the token ids (L,).
        places: by depth, the places of the digits (T,) that are asked for; by None, those of the number that is not in
            the text.
    """

    ids: Tensor
    places: dict[float | None, Tensor]


@dataclass(frozen=True)
class Haystacks:
    """Texts with numbers, by their length in tokens."""

    texts: dict[int, tuple[Hidden, ...]]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        rows: Iterable[Any],
        tokenizer: Any,
        lengths: Sequence[int] = LENGTHS,
        *,
        depths: Sequence[float] = DEPTHS,
        texts: int = TEXTS,
    ) -> Haystacks:
        """Make the texts from the rows of a user; the arguments and errors are those of `needle`."""
        refuse_name(tokenizer, "tokenizer")
        need_next_token(model, "hidden numbers are asked for")
        chosen = sorted(set(depths))
        if texts < 1 or not chosen or not 0 <= chosen[0] <= chosen[-1] <= 1 or len(chosen) >= len(NAMES):
            raise ValueError(
                f"a needle needs at least one text and 1 to {len(NAMES) - 1} depths from 0 to 1, got {texts} texts and "
                f"the depths {tuple(depths)}."
            )
        stream_L = stream(rows)
        limit = max_positions(model)
        room = len(stream_L) if limit is None else min(len(stream_L), limit)
        found: dict[int, tuple[Hidden, ...]] = {}
        shortest = 0
        for length in sorted(set(lengths)):
            made = []
            for number in range(texts):
                rng = random.Random(f"{length} {number}")
                hidden = _sentences(tokenizer, rng, len(chosen) + 1)
                shortest = 2 * sum(len(ids) for ids, _ in hidden)
                if shortest <= length <= room:
                    made.append(_hidden(stream_L.roll(-(number * len(stream_L) // texts)), length, chosen, hidden, rng))
            if len(made) == texts:
                found[length] = tuple(made)
        if not found:
            positions = "no bound on positions" if limit is None else f"{limit:,} positions"
            raise ValueError(
                f"no text of {', '.join(map(str, lengths))} tokens can hide numbers: the sentences alone take up to "
                f"{shortest}, the rows have {len(stream_L):,} together, and the model has {positions}; bring more "
                "text, or take other lengths."
            )
        return cls(found)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest text."""
        return max(self.texts)

    def measure(self, model: nn.Module, *, progress: bool = False) -> Needle:
        """Let a model read the texts, in evaluation mode."""
        cells: dict[int, dict[float, Finds]] = {}
        together: dict[int, Finds] = {}
        chance: dict[int, Finds] = {}
        with evaluating(model):
            for length, texts in bar(self.texts.items(), desc="needle", shown=progress, leave=False):
                read = [_read(model, text) for text in texts]
                by_depth = {depth: [numbers[depth] for numbers in read] for depth in read[0]}
                chance[length] = Finds.of(by_depth.pop(None))
                cells[length] = {depth: Finds.of(numbers) for depth, numbers in by_depth.items() if depth is not None}
                together[length] = Finds.of([number for numbers in by_depth.values() for number in numbers])
        return Needle(cells=cells, together=together, chance=chance)


def needle(
    model: nn.Module,
    rows: Iterable[Any],
    tokenizer: Any,
    *,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    texts: int = TEXTS,
    progress: bool = False,
) -> Needle:
    """Measure how often a causal language model finds numbers that are hidden in a text. The model does not change.

        found = needle(model, tokenizer(texts)["input_ids"], tokenizer)

    All models that read the same tokens with the same tokenizer read the same texts.

    Args:
        model: a causal language model, stock or swapped.
        rows: the real text, as in `recall`.
        tokenizer: of the model, for the sentences.
        lengths: the lengths of the texts, in tokens. A length is left out that the rows together or the positions of
            the model do not reach, or that is too short for the sentences.
        depths: where the sentences stand, from 0 (the beginning) to 1 (the end).
        texts: the number of texts of each length.
        progress: show a progress bar.

    Raises:
        ValueError: the model is no causal language model, a number is out of range, the rows hold no token ids, the
            tokenizer has no tokens of digits, or no length is possible.
    """
    return Haystacks.of(model, rows, tokenizer, lengths, depths=depths, texts=texts).measure(model, progress=progress)


def _sentences(tokenizer: Any, rng: random.Random, count: int) -> list[tuple[Tensor, Tensor]]:
    """Sentences of different names and numbers: token ids (L,), and the places of the digits (T,).

    Raises:
        ValueError: the tokenizer has no tokens of digits.
    """
    found = []
    for name in rng.sample(NAMES, count):
        number = str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        text = SENTENCE.format(name=name, number=number)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        places = [place for place, each in enumerate(ids) if any(map(str.isdigit, tokenizer.decode([each])))]
        if not places:
            raise ValueError(f"the tokenizer has no tokens of digits: {text!r} becomes {tokenizer.decode(ids)!r}.")
        found.append((torch.tensor(ids), torch.tensor(places)))
    return found


def _hidden(
    text_L: Tensor, length: int, depths: Sequence[float], sentences: list[tuple[Tensor, Tensor]], rng: random.Random
) -> Hidden:
    """A text with a sentence at each depth, and all sentences at the end; the last of them is not in the text."""
    kept = length - 2 * sum(len(ids) for ids, _ in sentences) + len(sentences[-1][0])
    pieces, start = [], 0
    for depth, (ids, _) in zip(depths, sentences, strict=False):
        end = round(depth * kept)
        pieces += [text_L[start:end], ids]
        start = end
    pieces.append(text_L[start:kept])
    order = list(enumerate((*depths, None)))
    rng.shuffle(order)
    places: dict[float | None, Tensor] = {}
    for number, asked_at in order:
        ids, digits_T = sentences[number]
        places[asked_at] = sum(map(len, pieces)) + digits_T
        pieces.append(ids)
    return Hidden(torch.cat(pieces), places)


def _read(model: nn.Module, text: Hidden) -> dict[float | None, tuple[Tensor, Tensor]]:
    """By depth, the log-probability of each digit and whether it is the first choice."""
    depths = sorted(text.places, key=lambda depth: int(text.places[depth][0]))
    log_p_1T, first_1T = token_log_probs(model, text.ids[None], torch.cat([text.places[depth] for depth in depths]))
    sizes = [len(text.places[depth]) for depth in depths]
    parts = zip(torch.split(log_p_1T[0], sizes), torch.split(first_1T[0], sizes), strict=True)
    found = dict(zip(depths, parts, strict=True))
    return {depth: found[depth] for depth in sorted(found, key=lambda depth: 2.0 if depth is None else depth)}
