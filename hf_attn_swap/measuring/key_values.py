"""Measures whether a causal language model recalls the values of keys: multi-query associative recall.

A text is n pairs of a key and a value, a pair in a line, and then the same pairs in another order:

    k_1 v_1
    ...
    k_n v_n
    k_7 v_7
    k_3 v_3
    ...

Keys and values are 2n different tokens, drawn at random from the tokens of a real text. The model is asked for each
value behind its key, in one pass. A guess among the values is right once in n times. Without the line breaks a small
pretrained model finds half as many: it does not see where a pair begins.

Arora et al. (2024, "Zoology"), there with models trained for it. Axes: N text, L token, T asked token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..text.bar import bar
from ..text.table import Table, Tabled
from ..text.typed import refuse_name
from .batches import evaluating
from .positions import max_positions
from .recall import AT_ONCE, stream
from .token_log_probs import need_next_token, token_log_probs

PAIRS = (16, 64, 256)
TEXTS = 4  # of each number of pairs


@dataclass(frozen=True, kw_only=True)
class Recalls:
    """The values that a model recalls.

    Attributes:
        values: how many values were asked for.
        found: the share of them that is the model's first choice, from 0 to 1.
        log_p: the mean log-probability of a value, in nats.
    """

    values: int
    found: float
    log_p: float


@dataclass(frozen=True, kw_only=True)
class KeyValues(Tabled):
    """What a model recalls of pairs, by their number."""

    by_pairs: dict[int, Recalls]

    def table(self) -> Table:
        """A row per number of pairs."""
        return key_value_table({"found": self})

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, by the number of pairs as a text."""
        return {str(pairs): asdict(recalls) for pairs, recalls in self.by_pairs.items()}


def key_value_table(by_name: Mapping[str, KeyValues]) -> Table:
    """A row per number of pairs, and a column per model.

    Args:
        by_name: what models recall of the same texts, by the names of the models.
    """
    each = list(by_name.values())
    rows = [
        (f"{pairs:,}", *(f"{found.by_pairs[pairs].found:.1%}" for found in each), f"{1 / pairs:.1%}")
        for pairs in each[0].by_pairs
    ]
    summary = "Values that are the model's first choice behind their key, of pairs of tokens that it has read once."
    return Table(summary=summary, header=("pairs", *by_name, "a guess"), rows=rows)


@dataclass(frozen=True)
class PairTexts:
    """Texts of pairs.

    Attributes:
        texts: by the number of pairs n, token ids (N,L) with L = 2n `line`.
        line: the number of tokens of a pair with its line break.
    """

    texts: dict[int, Tensor]
    line: int

    @classmethod
    def of(
        cls, model: nn.Module, rows: Iterable[Any], tokenizer: Any, pairs: Sequence[int] = PAIRS, *, texts: int = TEXTS
    ) -> PairTexts:
        """Make the texts from the tokens of rows; the arguments and errors are those of `key_values`."""
        refuse_name(tokenizer, "tokenizer")
        need_next_token(model, "values are asked for")
        if texts < 1 or min(pairs, default=0) < 2:
            raise ValueError(
                f"key_values takes at least one text and numbers of pairs from 2, got {texts} texts and {tuple(pairs)}."
            )
        break_T = torch.tensor(tokenizer("\n", add_special_tokens=False)["input_ids"], dtype=torch.long)
        known_T = torch.unique(stream(rows))
        known_T = known_T[~torch.isin(known_T, break_T)]
        line = 2 + len(break_T)
        limit = max_positions(model)
        room = len(known_T) // 2 if limit is None else min(len(known_T) // 2, limit // (2 * line))
        if not (possible := sorted({each for each in pairs if each <= room})):
            positions = "no bound on" if limit is None else f"{limit:,}"
            raise ValueError(
                f"{min(pairs)} pairs do not fit: the rows have {len(known_T):,} different tokens, of which a pair "
                f"takes two, and the model has {positions} positions, of which it takes {2 * line}."
            )
        made = {each: torch.stack([_text(known_T, break_T, each, seed) for seed in range(texts)]) for each in possible}
        return cls(made, line)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest text."""
        return max(texts_NL.shape[1] for texts_NL in self.texts.values())

    def measure(self, model: nn.Module, *, progress: bool = False) -> KeyValues:
        """Let a model read the texts, in evaluation mode."""
        found = {}
        with evaluating(model):
            for pairs, texts_NL in bar(self.texts.items(), desc="pairs", shown=progress, leave=False):
                places_T = self.line * torch.arange(pairs, 2 * pairs) + 1
                some = torch.split(texts_NL, max(1, AT_ONCE // texts_NL.shape[1]))
                log_p_NT, first_NT = map(
                    torch.cat, zip(*(token_log_probs(model, each, places_T) for each in some), strict=True)
                )
                found[pairs] = Recalls(
                    values=first_NT.numel(),
                    found=float(first_NT.double().mean()),
                    log_p=float(log_p_NT.double().mean()),
                )
        return KeyValues(by_pairs=found)


def key_values(
    model: nn.Module,
    rows: Iterable[Any],
    tokenizer: Any,
    *,
    pairs: Sequence[int] = PAIRS,
    texts: int = TEXTS,
    progress: bool = False,
) -> KeyValues:
    """Measure how many values of keys a causal language model recalls. The model does not change.

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
    return PairTexts.of(model, rows, tokenizer, pairs, texts=texts).measure(model, progress=progress)


def _text(known_T: Tensor, break_T: Tensor, pairs: int, seed: int) -> Tensor:
    """Pairs of different tokens, a pair in a line, and the same pairs in another order."""
    generator = torch.Generator().manual_seed(seed)
    pair_N2 = known_T[torch.randperm(len(known_T), generator=generator)[: 2 * pairs]].view(pairs, 2)
    again_N2 = pair_N2[torch.randperm(pairs, generator=generator)]
    lines = torch.cat([pair_N2, again_N2])
    return torch.cat([lines, break_T.expand(len(lines), -1)], 1).flatten()
