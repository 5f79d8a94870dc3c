"""Measures what causal language models write: texts beside another model's, and answers of tasks made from a seed.

`continuations`: a model goes on behind pieces of real text, and the texts of two models are compared token by token.
Behind the first difference the models read different texts, so the share of equal tokens falls quickly.

`tasks`: three tasks after RULER (Hsieh et al., 2024, appendix B), which need no data but the user's rows:

- `niah_multikey`: four sentences give a number for a word each, somewhere in a real text; one number is asked for.
- `vt` (variable tracking): five variables of one chain get their value from each other; all their names are asked for.
- `cwe` (common words): a numbered list of words, of which some come more often; the most frequent ones are asked for.

The score of an answer is RULER's: the share of the expected words that stand in what the model writes. `vt` and `cwe`
have one solved example in front, as RULER's prompts for models without instruction tuning. The texts and the number of
samples are others than RULER's, so its published scores are no comparison; the stock model's are. Everything is decoded
greedily, with the cache of keys and values.

Axes: L token.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

from ..text.bar import bar
from ..text.table import Table
from ..wiring.install import model_root
from .batches import evaluating, on_device
from .lost import Z95
from .recall import token_stream
from .retrieval import checked

LENGTHS = (1024, 4096)
SAMPLES = 10  # of each task and length
PROMPT, WRITTEN, PIECES = 64, 64, 16  # tokens that are read and written, and the pieces of text that are continued

KEYS, HOPS, COMMON = 4, 4, 10  # keys of a text, steps of a chain, frequent words
WORDS, ANSWER = 50, 120  # different words that the rows have at least, and tokens that are written of a list
NEEDLE = "\nOne of the special magic numbers for {key} is: {number}.\n"
MULTIKEY = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the numbers afterwards.\n",
    "\nWhat is the special magic number for {key} mentioned in the provided text? The special magic number for {key} "
    "mentioned in the provided text is",
)
TRACKING = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n",
    "\nQuestion: Find all variables that are assigned the value {value} in the text above. Answer: According to the "
    "chain(s) of variable assignment in the text above, {count} variables are assigned the value {value}, they are:",
)
COUNTING = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n",
    "\nQuestion: What are the {count} most common words in the above list? Answer: The top {count} words that appear "
    "most often in the list are:",
)


@dataclass(frozen=True)
class Sample:
    """A prompt, and what its answer is to hold.

    Attributes:
        ids: the token ids (L,).
        expected: the words that are counted.
        tokens: the number of tokens that a model writes.
    """

    ids: Tensor
    expected: tuple[str, ...]
    tokens: int

    def score(self, model: Any, tokenizer: Any) -> float:
        """The share of the expected words in what the model writes, from 0 to 1."""
        text = tokenizer.decode(_greedy(model, self.ids, self.tokens)).lower()
        return fmean(word.lower() in text for word in self.expected)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The scores of a model: by task and length in tokens, of each sample, from 0 to 1."""

    scores: dict[tuple[str, int], tuple[float, ...]]

    def to_dict(self) -> dict[str, Any]:
        """The scores as plain data, by task and length."""
        return {f"{task} {length}": list(scores) for (task, length), scores in self.scores.items()}


@dataclass(frozen=True)
class Tasks:
    """Samples by task and length in tokens."""

    samples: dict[tuple[str, int], tuple[Sample, ...]]
    tokenizer: Any

    def measure(self, model: nn.Module, *, progress: bool = False) -> Answered:
        """Let a model answer, in evaluation mode."""
        root = model_root(model)
        with evaluating(model):
            scores = {
                name: tuple(sample.score(root, self.tokenizer) for sample in samples)
                for name, samples in bar(self.samples.items(), desc="tasks", shown=progress, leave=False)
            }
        return Answered(scores=scores)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What a model wrote: the token ids behind each prompt, and the texts."""

    ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The texts."""
        return {"texts": list(self.texts)}


@dataclass(frozen=True)
class Continuations:
    """Prompts (L,), which models continue."""

    prompts: tuple[Tensor, ...]
    tokenizer: Any

    def measure(self, model: nn.Module, *, progress: bool = False) -> Written:
        """Let a model write, in evaluation mode."""
        with evaluating(model):
            prompts = bar(self.prompts, desc="continuations", shown=progress, leave=False)
            ids = tuple(tuple(_greedy(model_root(model), ids_L, WRITTEN)) for ids_L in prompts)
        return Written(ids=ids, texts=tuple(map(self.tokenizer.decode, ids)))


def continuations(model: nn.Module, rows: Iterable[Any], tokenizer: Any) -> Continuations:
    """Pieces of text at equal distances in the joined rows, for models with the same tokenizer to continue.

    Args:
        model: a causal language model, stock or swapped.
        rows: token ids, as in `recall`.
        tokenizer: of the model.

    Raises:
        ValueError: the model is no causal language model or has fewer than 128 positions, the tokenizer is a name, or
            the rows have fewer than 64 tokens together.
    """
    tokenizer, limit = checked(model, tokenizer, "text is written")
    if limit < PROMPT + WRITTEN:
        raise ValueError(f"a text takes {PROMPT + WRITTEN} tokens, and the model has {limit} positions.")
    stream_L = token_stream(rows)
    count = min(PIECES, len(stream_L) // PROMPT)
    if not count:
        raise ValueError(f"a prompt takes {PROMPT} tokens, and the rows have {len(stream_L)} together.")
    starts = [place * (len(stream_L) - PROMPT) // max(1, count - 1) for place in range(count)]
    return Continuations(tuple(stream_L[start : start + PROMPT] for start in starts), tokenizer)


def tasks(
    model: nn.Module,
    rows: Iterable[Any],
    tokenizer: Any,
    lengths: Sequence[int] = LENGTHS,
    samples: int = SAMPLES,
) -> Tasks:
    """Make the samples of the tasks. All models with the same tokenizer get the same samples.

    Args:
        model: a causal language model, stock or swapped.
        rows: token ids of real text, as in `recall`, in which the sentences are hidden.
        tokenizer: of the model.
        lengths: of the prompts and answers, in tokens. A length is left out that the rows or the model do not reach,
            and a task in a length that is too short for it, or for which the rows have too few words.
        samples: of each task and length.

    Raises:
        ValueError: the model is no causal language model, the tokenizer is a name, `samples` is below 1, the rows have
            too few words, or no length is possible.
    """
    tokenizer, limit = checked(model, tokenizer, "answers are written")
    if samples < 1:
        raise ValueError(f"tasks need at least one sample, got {samples}.")
    maker = _Maker(tokenizer, token_stream(rows))
    room = min(len(maker.text_L), limit)
    made: dict[tuple[str, int], tuple[Sample, ...]] = {}
    for name, make in (("niah_multikey", maker.multikey), ("vt", maker.tracking), ("cwe", maker.common)):
        for length in sorted(set(lengths)):
            if length <= room:
                drawn = tuple(make(length, random.Random(f"{name} {length} {n}")) for n in range(samples))
                if all(0.9 * length <= len(sample.ids) + sample.tokens <= length for sample in drawn):
                    made[name, length] = drawn
    if not made:
        raise ValueError(
            f"no text of {', '.join(map(str, lengths))} tokens can be made: the rows have {len(maker.text_L):,} tokens "
            f"together, and the model takes {room:,}; bring more text, or take other lengths."
        )
    return Tasks(made, maker.tokenizer)


class _Maker:
    """Makes samples of one length from real text.

    Raises:
        ValueError: the text has too few words.
    """

    def __init__(self, tokenizer: Any, text_L: Tensor) -> None:
        self.tokenizer, self.text_L = tokenizer, text_L
        both = tokenizer("a")["input_ids"]
        self.start = both[:1] if both[0] == getattr(tokenizer, "bos_token_id", None) else []
        words = sorted({word for word in tokenizer.decode(text_L).split() if word.isascii() and word.islower()})
        self.words = [word for word in words if word.isalpha() and 4 <= len(word) <= 8]
        if len(self.words) < WORDS:
            raise ValueError(
                f"the tasks take {WORDS} different words from the rows, which have {len(self.words)}; bring more text "
                "(on the command line, more --rows)."
            )

    def multikey(self, length: int, rng: random.Random) -> Sample:
        """Numbers of words, one of which is asked for."""
        numbers = {key: str(rng.randrange(10**6, 10**7)) for key in rng.sample(self.words, KEYS)}
        key = rng.choice(list(numbers))
        sentences = [NEEDLE.format(key=key, number=number) for key, number in numbers.items()]
        before, after = MULTIKEY
        return self._hidden(before, sentences, after.format(key=key), (numbers[key],), length, rng, 24)

    def tracking(self, length: int, rng: random.Random) -> Sample:
        """A chain of variables, behind a solved example in few sentences."""
        example, names, value = self._chain(rng)
        before, after = TRACKING
        solved = before + "".join(example) + after.format(value=value, count=len(names)) + f" {' '.join(names)}\n\n"
        sentences, names, value = self._chain(rng)
        after = after.format(value=value, count=len(names))
        return self._hidden(solved + before, sentences, after, names, length, rng, 40)

    def common(self, length: int, rng: random.Random) -> Sample:
        """A list of words, behind a solved example of a short list."""
        drawn = rng.sample(self.words, len(self.words))
        before, after = COUNTING
        after = after.format(count=COMMON)
        shown, few, frequent = (drawn[start : start + COMMON] for start in (0, COMMON, 2 * COMMON))
        rare = drawn[3 * COMMON :]
        solved = before + _listed(rng, shown, few, 3, 1) + after + f" {_numbered(shown)}\n\n"
        often = 3 if length >= 4096 else 1  # of a rare word; a frequent one comes ten times as often, as in RULER

        def prompt(count: int) -> list[int]:
            listed = _listed(random.Random(f"{count} {frequent[0]}"), frequent, rare[:count], 10 * often, often)
            return [*self.start, *self._ids(solved + before + listed + after)]

        counts = range(len(rare) + 1)
        more = bisect.bisect_left(counts, True, key=lambda count: len(prompt(count)) + ANSWER > length)
        return Sample(torch.tensor(prompt(max(0, more - 1))), tuple(frequent), ANSWER)

    def _chain(self, rng: random.Random) -> tuple[list[str], tuple[str, ...], str]:
        """The sentences of a chain, the names of its variables, and their value."""
        names = tuple("".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)) for _ in range(HOPS + 1))
        value = str(rng.randrange(10**4, 10**5))
        values = [value, *(f"VAR {name}" for name in names)]
        return [f"\nVAR {name} = {given}\n" for name, given in zip(names, values, strict=False)], names, value

    def _hidden(
        self,
        before: str,
        sentences: Sequence[str],
        after: str,
        expected: tuple[str, ...],
        length: int,
        rng: random.Random,
        tokens: int,
    ) -> Sample:
        """Sentences in their order at random places of a real text, and a question."""
        pieces = [self._ids(text) for text in (before, *sentences, after)]
        room = max(0, length - tokens - len(self.start) - sum(map(len, pieces)))
        first = rng.randrange(len(self.text_L) - room + 1)
        text = self.text_L[first : first + room].tolist()
        ids, last = [*self.start, *pieces[0]], 0
        for place, piece in zip(sorted(rng.randint(0, room) for _ in sentences), pieces[1:-1], strict=True):
            ids += text[last:place] + piece
            last = place
        return Sample(torch.tensor(ids + text[last:] + pieces[-1]), expected, tokens)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def agreement_table(by_name: Mapping[str, Written]) -> Table:
    """How far two models write the same texts."""
    first, second = by_name.values()
    equal, same = agreement(first, second)
    count = sum(ours == theirs for ours, theirs in zip(first.ids, second.ids, strict=True))
    rows = [
        ("equal tokens, mean", f"{fmean(equal):.0%}"),
        ("tokens before the first difference, mean", f"{fmean(same):.1f} of {max(map(len, first.ids))}"),
        ("equal texts", f"{count} of {len(same)}"),
    ]
    summary = f"Greedy texts of both models behind {len(same)} prompts of {PROMPT} tokens."
    return Table(summary=summary, header=("", "second beside first"), rows=rows)


def agreement(first: Written, second: Written) -> tuple[list[float], list[int]]:
    """The share of equal tokens, and the number of tokens before the first difference, of each prompt."""
    equal, same = [], []
    for ours, theirs in zip(first.ids, second.ids, strict=True):
        pairs = [a == b for a, b in zip(ours, theirs, strict=False)]
        longest = max(len(ours), len(theirs), 1)
        equal.append(sum(pairs) / longest)
        same.append(pairs.index(False) if False in pairs else len(pairs))
    return equal, same


def score_table(by_name: Mapping[str, Answered]) -> Table:
    """A row per task and length: the mean scores, and their difference with its 95 % interval over the samples."""
    first, second = by_name.values()
    rows = []
    for (task, length), ours in first.scores.items():
        theirs = second.scores[task, length]
        mean, margin = _mean([b - a for a, b in zip(ours, theirs, strict=True)])
        rows.append((task, f"{length:,}", f"{fmean(ours):.1%}", f"{fmean(theirs):.1%}", f"{mean:+.1%} ± {margin:.1%}"))
    count = len(next(iter(first.scores.values())))
    summary = f"Expected words that stand in the answers, of {count} samples of each task and length (RULER's score)."
    return Table(summary=summary, header=("task", "tokens", *by_name, "difference (95 %)"), rows=rows)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95 % interval; infinite for a single value."""
    return fmean(values), Z95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


@torch.no_grad()
def _greedy(model: Any, ids_L: Tensor, tokens: int) -> list[int]:
    """The token ids that a model writes behind a prompt, as its most probable ones."""
    batch = on_device(model, {"input_ids": ids_L[None], "attention_mask": torch.ones_like(ids_L)[None]})
    out = model.generate(**batch, max_new_tokens=tokens, do_sample=False, num_beams=1, pad_token_id=0)
    return [int(token) for token in out[0, len(ids_L) :]]


def _listed(rng: random.Random, frequent: Sequence[str], rare: Sequence[str], often: int, seldom: int) -> str:
    """A numbered list in random order."""
    words = [*frequent] * often + [*rare] * seldom
    rng.shuffle(words)
    return _numbered(words)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
