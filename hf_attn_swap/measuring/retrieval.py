"""Measures what a causal language model retrieves from a text: hidden numbers, by length and depth; and values of keys.

`needle`: a sentence with a number stands at each depth of a real text, 0 at its beginning and 1 at its end, each under
another name:

    ... The special number of Paris is 48213. ... The special number of Oslo is 90736. ...

At the end the sentences stand again, in another order, and the model is asked for the digits, each given the ones
before it. So one pass asks for all depths. One sentence more is asked for and was never hidden: what the model gives of
it is chance. After the test of Kamradt (2023, "Needle in a Haystack"); several numbers in one text are those of RULER
(Hsieh et al., 2024).

`key_values`: a text is n pairs of a key and a value, a pair in a line, and then the same pairs in another order:

    k_1 v_1
    ...
    k_n v_n
    k_7 v_7
    k_3 v_3
    ...

Keys and values are 2n different tokens, drawn at random from the tokens of a real text. The model is asked for each
value behind its key, in one pass. A guess among the values is right once in n times. Without the line breaks a small
pretrained model finds half as many: it does not see where a pair begins. Arora et al. (2024, "Zoology"), there with
models trained for it.

Axes: L token, T token of an answer.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from statistics import fmean
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ..text.bar import bar
from ..text.table import Table, Tabled
from ..text.tokenizer import own_tokenizer
from ..text.typed import refuse_name
from .batches import evaluating, max_positions
from .recall import need_next_token, token_log_probs, token_stream

LENGTHS = (256, 1024, 4096)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
PAIRS = (16, 64, 256)
TEXTS = 4  # of each length, or of each number of pairs
DIGITS = 5
SENTENCE = " The special number of {name} is {number}."
NAMES = ("Paris", "London", "Rome", "Berlin", "Madrid", "Oslo", "Athens", "Dublin", "Prague", "Lisbon", "Warsaw")

Answer = tuple[Tensor, Tensor]  # the log-probability of each token (T,), and whether it is the first choice (T,)
Answers = dict[int, dict[Any, list[Answer]]]  # by length or pairs, and by depth or pair: the answer in each text
R = TypeVar("R")


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """How many answers a model gives: hidden numbers, or values of keys.

    Attributes:
        count: how many answers were asked for.
        exact_match: the share of the answers of which each token is the model's first choice, from 0 to 1. These are
            the answers that the model would write.
        token_accuracy: the share of the tokens that are the model's first choice. For a digit, a guess is right once in
            ten times; less often if the tokenizer makes one token of several digits.
        log_p: the mean log-probability of a token, in nats; a guess of a digit has -2.3.
    """

    count: int
    exact_match: float
    token_accuracy: float
    log_p: float

    @classmethod
    def of(cls, answers: Iterable[Answer]) -> Retrieved:
        """The figures of some answers."""
        log_p, first = zip(*answers, strict=True)
        return cls(
            count=len(first),
            exact_match=fmean(bool(first_T.all()) for first_T in first),
            token_accuracy=float(torch.cat(first).double().mean()),
            log_p=float(torch.cat(log_p).double().mean()),
        )


@dataclass(frozen=True)
class Prompt:
    """A text, and the places of the answers that a model is asked for.

    Attributes:
        ids: the token ids (L,).
        answers: the places of the tokens (T,) of each answer: by the depth of a number, None for the number that is not
            in the text; by the number of a pair.
    """

    ids: Tensor
    answers: dict[Any, Tensor]

    def read(self, model: nn.Module) -> dict[Any, Answer]:
        """Let a model read the text once."""
        sizes = [len(places_T) for places_T in self.answers.values()]
        log_p_1T, first_1T = token_log_probs(model, self.ids[None], torch.cat(list(self.answers.values())))
        log_p, first = torch.split(log_p_1T[0], sizes), torch.split(first_1T[0], sizes)
        return dict(zip(self.answers, zip(log_p, first, strict=True), strict=True))


@dataclass(frozen=True, kw_only=True)
class Needle(Tabled):
    """The numbers that a model finds.

    Attributes:
        cells: by the length of the text in tokens, and by the depth from 0 to 1.
        together: by the length, over all depths.
        chance: by the length, the numbers that were not in the text.
    """

    cells: dict[int, dict[float, Retrieved]]
    together: dict[int, Retrieved]
    chance: dict[int, Retrieved]

    @classmethod
    def of(cls, answers: Answers) -> Needle:
        """The figures of the answers by length and depth."""
        hidden = {length: {d: a for d, a in by_depth.items() if d is not None} for length, by_depth in answers.items()}
        return cls(
            cells={length: {d: Retrieved.of(a) for d, a in by_depth.items()} for length, by_depth in hidden.items()},
            together={length: Retrieved.of(chain(*by_depth.values())) for length, by_depth in hidden.items()},
            chance={length: Retrieved.of(by_depth[None]) for length, by_depth in answers.items()},
        )

    def table(self) -> Table:
        """A row per depth, a column per length."""
        return needle_table({"": self})

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, by lengths and depths as texts."""
        return {
            str(length): {
                **asdict(self.together[length]),
                "depths": {f"{depth:g}": asdict(cell) for depth, cell in cells.items()},
                "chance": asdict(self.chance[length]),
            }
            for length, cells in self.cells.items()
        }


def needle_table(by_name: Mapping[str, Needle]) -> Table:
    """A row per depth, and a column per length and model.

    Args:
        by_name: what models find in the same texts, by the names of the models.
    """
    needles = list(by_name.values())
    columns = [(length, needle) for length in needles[0].cells for needle in needles]
    depths = next(iter(needles[0].cells.values()))
    figures = {f"{depth:.0%}": [needle.cells[length][depth] for length, needle in columns] for depth in depths}
    figures["all"] = whole = [needle.together[length] for length, needle in columns]
    figures["not hidden (chance)"] = [needle.chance[length] for length, needle in columns]
    rows = [(words, *(f"{cell.token_accuracy:.0%}" for cell in cells)) for words, cells in figures.items()]
    rows.append(("numbers found", *(f"{round(cell.exact_match * cell.count)} of {cell.count}" for cell in whole)))
    header = ("depth", *(f"{length:,} {name}".strip() for length in needles[0].cells for name in by_name))
    summary = "Digits of hidden numbers that are the model's first choice, by the depth and the tokens of the text."
    return Table(summary=summary, header=header, rows=rows)


@dataclass(frozen=True, kw_only=True)
class KeyValues(Tabled):
    """The values of keys that a model finds, by the number of pairs."""

    by_pairs: dict[int, Retrieved]

    @classmethod
    def of(cls, answers: Answers) -> KeyValues:
        """The figures of the answers by number of pairs."""
        return cls(by_pairs={pairs: Retrieved.of(chain(*by_pair.values())) for pairs, by_pair in answers.items()})

    def table(self) -> Table:
        """A row per number of pairs."""
        return key_value_table({"found": self})

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, by the number of pairs as a text."""
        return {str(pairs): asdict(values) for pairs, values in self.by_pairs.items()}


def key_value_table(by_name: Mapping[str, KeyValues]) -> Table:
    """A row per number of pairs, and a column per model.

    Args:
        by_name: what models find in the same texts, by the names of the models.
    """
    models = list(by_name.values())
    rows = [
        (f"{pairs:,}", *(f"{model.by_pairs[pairs].exact_match:.1%}" for model in models), f"{1 / pairs:.1%}")
        for pairs in models[0].by_pairs
    ]
    summary = "Values that are the model's first choice behind their key, of pairs of tokens that it has read once."
    return Table(summary=summary, header=("pairs", *by_name, "a guess"), rows=rows)


@dataclass(frozen=True)
class Prompts(Generic[R]):
    """Texts by their length in tokens, or by their number of pairs, and what makes figures of the answers."""

    texts: dict[int, tuple[Prompt, ...]]
    figures: Callable[[Answers], R]

    def measure(self, model: nn.Module, *, progress: bool = False) -> R:
        """Let a model read the texts, in evaluation mode."""
        answers: Answers = {}
        with evaluating(model):
            for size, texts in bar(self.texts.items(), desc="retrieval", shown=progress, leave=False):
                read = [text.read(model) for text in texts]
                answers[size] = {name: [by_name[name] for by_name in read] for name in read[0]}
        return self.figures(answers)


def haystacks(
    model: nn.Module,
    rows: Iterable[Any],
    tokenizer: Any,
    lengths: Sequence[int] = LENGTHS,
    depths: Sequence[float] = DEPTHS,
    texts: int = TEXTS,
) -> Prompts[Needle]:
    """Texts with numbers, by their length in tokens; the arguments and errors are those of `needle`."""
    tokenizer, limit = checked(model, tokenizer, "hidden numbers are asked for")
    depths = sorted(set(depths))
    if texts < 1 or not depths or not 0 <= depths[0] <= depths[-1] <= 1 or len(depths) >= len(NAMES):
        raise ValueError(
            f"a needle needs at least one text and 1 to {len(NAMES) - 1} depths from 0 to 1, got {texts} texts and "
            f"the depths {tuple(depths)}."
        )
    stream_L = token_stream(rows)
    by_length: dict[int, tuple[Prompt, ...]] = {}
    shortest = 0
    for length in sorted(set(lengths)):
        made = []
        for number in range(texts):
            rng = random.Random(f"{length} {number}")
            sentences = _sentences(tokenizer, rng, len(depths) + 1)
            shortest = 2 * sum(len(ids) for ids, _ in sentences)
            if shortest <= length <= min(len(stream_L), limit):
                text_L = stream_L.roll(-(number * len(stream_L) // texts))
                made.append(_haystack(text_L, length, depths, sentences, rng))
        if len(made) == texts:
            by_length[length] = tuple(made)
    if not by_length:
        raise ValueError(
            f"no text of {', '.join(map(str, lengths))} tokens can hide numbers: the sentences alone take up to "
            f"{shortest}, the rows have {len(stream_L):,} together, and the model has {_words(limit)} positions; "
            "bring more text, or take other lengths."
        )
    return Prompts(by_length, Needle.of)


def pair_texts(
    model: nn.Module, rows: Iterable[Any], tokenizer: Any, pairs: Sequence[int] = PAIRS, texts: int = TEXTS
) -> Prompts[KeyValues]:
    """Texts of pairs, by the number of pairs; the arguments and errors are those of `key_values`."""
    tokenizer, limit = checked(model, tokenizer, "values are asked for")
    if texts < 1 or min(pairs, default=0) < 2:
        raise ValueError(
            f"key_values takes at least one text and numbers of pairs from 2, got {texts} texts and {tuple(pairs)}."
        )
    break_T = torch.tensor(tokenizer("\n", add_special_tokens=False)["input_ids"], dtype=torch.long)
    known_T = torch.unique(token_stream(rows))
    known_T = known_T[~torch.isin(known_T, break_T)]
    room = min(len(known_T) // 2, limit // (2 * (2 + len(break_T))))
    if not (possible := sorted({count for count in pairs if count <= room})):
        raise ValueError(
            f"{min(pairs)} pairs do not fit: the rows have {len(known_T):,} different tokens, of which a pair "
            f"takes two, and the model has {_words(limit)} positions, of which it takes {2 * (2 + len(break_T))}."
        )
    by_pairs = {count: tuple(_pairs(known_T, break_T, count, seed) for seed in range(texts)) for count in possible}
    return Prompts(by_pairs, KeyValues.of)


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

        numbers = needle(model, tokenizer(texts)["input_ids"], tokenizer)

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
    return haystacks(model, rows, tokenizer, lengths, depths, texts).measure(model, progress=progress)


def key_values(
    model: nn.Module,
    rows: Iterable[Any],
    tokenizer: Any,
    *,
    pairs: Sequence[int] = PAIRS,
    texts: int = TEXTS,
    progress: bool = False,
) -> KeyValues:
    """Measure how many values of keys a causal language model finds. The model does not change.

    Args:
        model: a causal language model, stock or swapped.
        rows: token ids, as in `recall`; their different tokens become keys and values.
        tokenizer: of the model, for the line break.
        pairs: the numbers of pairs. A number is left out if the rows have too few different tokens, or the model too
            few positions (6 for each pair, if a line break is one token).
        texts: the number of texts for each number of pairs.
        progress: show a progress bar.

    Raises:
        ValueError: the model is no causal language model, a number is out of range, the rows hold no token ids, or no
            number of pairs is possible.
    """
    return pair_texts(model, rows, tokenizer, pairs, texts).measure(model, progress=progress)


def checked(model: nn.Module, tokenizer: Any, what: str) -> tuple[Any, float]:
    """A copy of the tokenizer, and the number of positions of the model, infinity if it names none.

    Args:
        model: the model.
        tokenizer: its tokenizer.
        what: what is done by the next token, with its verb: "values are asked for".

    Raises:
        ValueError: the tokenizer is a name, or the model is no causal language model.
    """
    refuse_name(tokenizer, "tokenizer")
    need_next_token(model, what)
    return own_tokenizer(tokenizer), max_positions(model) or math.inf


def _words(limit: float) -> str:
    """A number of positions."""
    return "no bound on" if limit == math.inf else f"{limit:,}"


def _sentences(tokenizer: Any, rng: random.Random, count: int) -> list[tuple[Tensor, Tensor]]:
    """Sentences of different names and numbers: token ids (L,), and the places of the digits (T,).

    Raises:
        ValueError: the tokenizer has no tokens of digits.
    """
    sentences = []
    for name in rng.sample(NAMES, count):
        number = str(rng.randrange(10 ** (DIGITS - 1), 10**DIGITS))
        text = SENTENCE.format(name=name, number=number)
        ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
        places = [place for place, token in enumerate(ids) if any(map(str.isdigit, tokenizer.decode([token])))]
        if not places:
            raise ValueError(f"the tokenizer has no tokens of digits: {text!r} becomes {tokenizer.decode(ids)!r}.")
        sentences.append((torch.tensor(ids), torch.tensor(places)))
    return sentences


def _haystack(
    text_L: Tensor, length: int, depths: Sequence[float], sentences: list[tuple[Tensor, Tensor]], rng: random.Random
) -> Prompt:
    """A text with a sentence at each depth, and all sentences at the end; the last of them is not in the text."""
    kept = length - 2 * sum(len(ids) for ids, _ in sentences) + len(sentences[-1][0])
    pieces, start = [], 0
    for depth, (ids, _) in zip(depths, sentences, strict=False):
        end = round(depth * kept)
        pieces += [text_L[start:end], ids]
        start = end
    pieces.append(text_L[start:kept])
    order = list(zip((*depths, None), sentences, strict=True))
    rng.shuffle(order)
    places: dict[float | None, Tensor] = {}
    for hidden_at, (ids, digits_T) in order:
        places[hidden_at] = sum(map(len, pieces)) + digits_T
        pieces.append(ids)
    return Prompt(torch.cat(pieces), {hidden_at: places[hidden_at] for hidden_at in (*depths, None)})


def _pairs(known_T: Tensor, break_T: Tensor, count: int, seed: int) -> Prompt:
    """Pairs of different tokens, a pair in a line, and the same pairs in another order."""
    generator = torch.Generator().manual_seed(seed)
    pair_N2 = known_T[torch.randperm(len(known_T), generator=generator)[: 2 * count]].view(count, 2)
    again_N2 = pair_N2[torch.randperm(count, generator=generator)]
    lines = torch.cat([pair_N2, again_N2])
    lines = torch.cat([lines, break_T.expand(len(lines), -1)], 1)
    values = (count + torch.arange(count)) * lines.shape[1] + 1
    return Prompt(lines.flatten(), dict(enumerate(torch.split(values, 1))))
