"""Makes the attention sink of a pretrained language model explicit: writes one token's keys and values into `sink`.

The first token of a text becomes a sink, and carries activations that are thousands of times the others. If the keys
and values of some token stand before every text, no token of the text becomes one. With k' = the keys of these tokens
at the positions -n to -1 and v' their values, in every layer, the model on a text is the stock model on the tokens and
the text. Nothing is trained. docs/mathematics.md, section Sinks.
Sun et al. (2024), for massive activations. Axes: B batch, L token, E model width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from ..caches import with_cache
from ..core.kind import Kind
from ..families import Site
from ..layer.swap import Swap
from ..measuring.batches import evaluating
from ..patch import need_installation, swappable
from ..variants.sink import Sink
from ..wiring.install import Installation

MASSIVE = 1000.0  # a token is massive if an activation is above this number of medians,
LARGE = 100.0  # and above this number: Sun et al. (2024), section 2
LENGTH = 512  # tokens of a text that are read
TEXTS = 8
SHORT = 16  # tokens on which the positions are tried
MOVED = 1e-2  # the largest relative change of outputs by other positions that is rounding


@dataclass(frozen=True, kw_only=True)
class Absorbed:
    """What `absorb_sink` found and wrote.

    Attributes:
        tokens: the numbers of the tokens, in their order before a text.
        words: the same tokens as text.
        before: the largest activation of any token of the texts after each block, without the tokens.
        after: the same with the tokens before each text.
        massive: the number of massive tokens of the texts, before and after.
    """

    tokens: tuple[int, ...]
    words: tuple[str, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    massive: tuple[int, int]

    def __str__(self) -> str:
        return (
            f"The keys and values of {' '.join(map(repr, self.words))} stand before every text. Massive tokens: "
            f"{self.massive[1]} ({self.massive[0]} before). Largest activation: {max(self.after):,.0f} "
            f"({max(self.before):,.0f} before)."
        )


@dataclass(frozen=True)
class _Seen:
    """The largest activation after each block, and the number of massive tokens."""

    largest: tuple[float, ...]
    massive: int

    @property
    def order(self) -> tuple[int, float]:
        """Fewer massive tokens are better, and then smaller activations."""
        return self.massive, max(self.largest)


def absorb_sink(
    model: nn.Module, processor: Any, texts: Iterable[str], *, tokens: Sequence[int] | None = None
) -> Absorbed:
    """Write the keys and values of the token that serves best as a sink into the model's swaps, in place.

    Candidates are the tokens of a line break, a full stop and a space, the special tokens, and the first tokens of the
    texts. Lists of up to `tokens` tokens of the swap are tried, each one token longer than the best before it; the
    option `tokens` of `sink` is the length of the list that is written. No weight of the model changes.

    Args:
        model: a causal language model that is patched in all layers with `sink`, alone or in a composition, with
            kind="key_value". Its positions must count relatively, as rotary embeddings do.
        processor: its tokenizer.
        texts: a few texts; the first eight are read, 512 tokens of each.
        tokens: the numbers of the tokens to take, instead of a search.

    Returns:
        What was found.

    Raises:
        ValueError: the model is not patched so, is no causal language model, or counts positions by a learned table;
            there are no texts; or `tokens` are not as many as the pairs of the swaps. The model is unchanged.
    """
    installation = need_installation(model)
    swaps = _sinks(installation)
    count = swaps[0].further_keys
    with evaluating(model), installation.stock(), torch.no_grad():
        rows = _rows(model, processor, texts)
        _check_positions(model, rows[0], count)
        before = _measure(model, rows, ())
        if tokens is None:
            chosen = _search(model, processor, rows, count)
        elif len(tokens) != count:
            raise ValueError(f"the swaps have {count} pairs and {len(tokens)} tokens were given; give as many.")
        else:
            chosen = tuple(int(token) for token in tokens)
        after = _measure(model, rows, chosen)
        cache = _cache_of(model, chosen, -count)
        _write(swaps, cache)
    return Absorbed(
        tokens=chosen,
        words=tuple(processor.decode([token]) for token in chosen),
        before=before.largest,
        after=after.largest,
        massive=(before.massive, after.massive),
    )


def _sinks(installation: Installation) -> list[Swap]:
    """The swaps of all layers, each with a sink of keys and values.

    Raises:
        ValueError: a layer has none, or the model is no causal decoder with one module for each layer.
    """
    usable: list[Site] = swappable(installation.root)
    swaps = installation.swaps()
    if any(site.kind is not Kind.DECODER or site.family.shared for site in usable):
        raise ValueError(
            "a sink is absorbed from the first token of a causal language model whose layers have weights of their "
            "own; this model has other attention. Train the sink instead."
        )
    found = [swaps[index][0] for index in range(len(usable)) if index in swaps]
    sinks = [swap.at("keys") for swap in found]
    fit = [sink for sink in sinks if isinstance(sink, Sink) and sink.options.kind == "key_value"]
    if len(fit) < len(usable):
        raise ValueError(
            f"{len(usable) - len(fit)} of {len(usable)} attention layers have no sink with kind='key_value', so the "
            "model could not be the stock model on a token and the text; patch all layers with sink first."
        )
    if len({sink.further_keys for sink in fit}) > 1:
        raise ValueError("the layers have different numbers of pairs; patch all layers with one tokens=.")
    return found


def _rows(model: nn.Module, processor: Any, texts: Iterable[str]) -> list[Tensor]:
    """The tokens of the first texts, (1,L) each, on the model's device.

    Raises:
        ValueError: no text has two tokens.
    """
    device = next(model.parameters()).device
    rows = []
    for _, text in zip(range(TEXTS), texts, strict=False):
        ids = torch.tensor([processor(text).input_ids[:LENGTH]], device=device)
        if ids.shape[1] > 1:
            rows.append(ids)
    if not rows:
        raise ValueError("there is no text of two tokens or more; pass a few texts like those that the model reads.")
    return rows


def _check_positions(model: Any, row: Tensor, count: int) -> None:
    """Compare the outputs of a text with those at later positions.

    Raises:
        ValueError: the outputs differ, or the model takes no positions.
    """
    row = row[:, :SHORT]
    places = torch.arange(row.shape[1], device=row.device)[None]
    try:
        here = model(input_ids=row, position_ids=places, use_cache=False).logits
        later = model(input_ids=row, position_ids=places + count, use_cache=False).logits
    except TypeError:
        here = later = None
    if here is None or later is None or (later - here).norm() > MOVED * here.norm():
        raise ValueError(
            "this model's positions do not count relatively (a learned table, for example), so that no key stands for "
            "a token before the text; train the sink instead."
        )


def _search(model: Any, processor: Any, rows: list[Tensor], count: int) -> tuple[int, ...]:
    """The best list of `count` tokens: each is the best one behind those before it."""
    candidates = _candidates(processor, rows)
    best: tuple[int, ...] = ()
    for _ in range(count):
        tried = {(*best, each): _measure(model, rows, (*best, each)) for each in candidates}
        best = min(tried, key=lambda each: tried[each].order)
    return best


def _candidates(processor: Any, rows: list[Tensor]) -> list[int]:
    """Tokens that may serve as sinks, each once."""
    written = [processor(text, add_special_tokens=False).input_ids for text in ("\n", ".", " ")]
    found = [ids[-1] for ids in written if ids] + list(processor.all_special_ids)
    return list(dict.fromkeys([*found, *(int(row[0, 0]) for row in rows)]))


def _cache_of(model: Any, tokens: tuple[int, ...], first: int) -> DynamicCache:
    """The cache after these tokens, of which the first is at position `first`."""
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], device=device)
    cache = DynamicCache()
    places = torch.arange(first, first + len(tokens), device=device)[None]
    model(input_ids=ids, position_ids=places, **with_cache(model, cache), use_cache=True)
    return cache


def _measure(model: Any, rows: list[Tensor], tokens: tuple[int, ...]) -> _Seen:
    """What the stock model's blocks give on the texts, with these tokens before each."""
    largest: list[float] = []
    massive = 0
    for row in rows:
        given: dict[str, Any] = {"use_cache": False}
        if tokens:
            given = {**with_cache(model, _cache_of(model, tokens, -len(tokens))), "use_cache": True}
        places = torch.arange(row.shape[1], device=row.device)[None]
        states = model(input_ids=row, position_ids=places, output_hidden_states=True, **given).hidden_states
        sizes = [state[0].abs().float() for state in states[1:-1]]  # the last one is normed
        tops = torch.stack([size.amax(-1) for size in sizes])  # (layers,L)
        medians = torch.stack([size.median() for size in sizes])[:, None]
        massive += int(((tops > LARGE) & (tops > MASSIVE * medians)).any(0).sum())
        own = tops.amax(1).tolist()
        largest = [max(pair) for pair in zip(largest, own, strict=True)] if largest else own
    return _Seen(tuple(largest), massive)


def _write(swaps: list[Swap], cache: DynamicCache) -> None:
    """Write the cached keys and values (1,G,n,D) of each layer into its sink."""
    for swap, layer in zip(swaps, cache.layers, strict=True):
        sink = swap.at("keys")
        assert isinstance(sink, Sink)
        key, value, _ = sink.learned()
        assert key is not None
        assert value is not None
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        key.copy_(layer.keys[0])
        value.copy_(layer.values[0])
