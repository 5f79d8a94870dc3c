"""Makes the attention sink of a pretrained language model explicit: writes one token's keys and values into `sink`.

The first token of a text becomes a sink, and carries activations that are thousands of times the others. If the keys
and values of some token stand before every text, no token of the text becomes one. With k' = the keys of these tokens
at the positions -n to -1 and v' their values, in every layer, the model on a text is the stock model on the tokens and
the text. Nothing is trained. docs/mathematics.md, section Sinks.
Sun et al. (2024), for massive activations. Axes: B batch, L token, E model width.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..core.kind import Kind
from ..layer.registry import canonical_keys, parse, parse_options
from ..layer.swap import Swap
from ..measuring.batches import evaluating
from ..measuring.lm_head import can_skip_logits
from ..measuring.lost import Lost
from ..patch import build_swap, need_installation, replace_swaps, softmax_swaps, swappable
from ..text.tokenizer import own_tokenizer
from ..text.typed import refuse_name
from ..variants.sink import Sink
from ..variants.softmax import Softmax
from ..wiring.install import Installation, model_root
from ..wiring.layers import Layer
from .config import ConvertConfig
from .rows import TOKENS
from .run import Run

MASSIVE = 1000.0  # a token is massive if an activation is above this number of medians,
LARGE = 100.0  # and above this number: Sun et al. (2024), section 2
LENGTH = 512  # tokens of a text that are read
TEXTS = 8
SHORT = 16  # tokens on which positions and pairs are tried
ROUNDING = 1e-3  # the largest relative difference of outputs that is rounding, in fp32,
MOVED = 0.05  # in half precision: by other positions,
SHARE = 0.15  # and by pairs instead of tokens, as a share of what the tokens change

KINDS = ("key_value", "score_value")  # of `sink`, which can stand for a token
NOT_STOCK = (
    "with these pairs the model is not the stock model that reads the tokens first: its positions are not relative in "
    f"all layers, something else than attention carries tokens on, or a sliding window is shorter than {SHORT} tokens; "
    "train the sink instead."
)

Pair = tuple[Tensor, Tensor]  # keys and values of a layer, (G,n,D) each


@dataclass(frozen=True, kw_only=True)
class Absorbed:
    """What `absorb_sink` found and wrote.

    Attributes:
        tokens: the numbers of the tokens, in their order before a text.
        words: the same tokens as text.
        before: the largest activation of any token of the texts after each block but the last, without the tokens.
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
    """The largest activation after each block but the last, and the number of massive tokens."""

    largest: tuple[float, ...]
    massive: int
    of_rows: tuple[float, ...]  # the largest activation of each text

    @property
    def order(self) -> tuple[int, float]:
        """Fewer massive tokens are better, and then smaller activations."""
        return self.massive, max(self.largest)


def absorb_sink(
    model: nn.Module, processor: Any, texts: Iterable[str], *, tokens: Sequence[int] | None = None
) -> Absorbed:
    """Write the keys and values of the token that serves best as a sink into the model's swaps, in place.

    Candidates are the tokens of a line break, a full stop and a space, the special tokens, and the first tokens of the
    texts. As many tokens are taken as the swaps have pairs (the option `tokens` of `sink`): first the best single
    token, then the best token behind it, and so on. No weight of the model changes.

    Before anything is written, the model with the pairs is compared on 16 tokens with the stock model that reads the
    chosen tokens first.

    Args:
        model: a causal language model that is patched in all layers with `sink`, alone or in a composition, with
            kind="key_value"; or with "score_value", which gets the mean score of the key over the texts in its place.
            Its positions must count relatively, as rotary embeddings do.
        processor: its tokenizer.
        texts: a few texts; the first eight are read, 512 tokens of each.
        tokens: the numbers of the tokens to take, instead of a search.

    Returns:
        What was found.

    Raises:
        ValueError: a layer has no sink of keys and values, or another number of pairs than the others; the model is no
            causal decoder; no pair can stand for a token before the text (learned positions, or a sliding window of a
            few tokens); the weights of the swaps are offloaded; there are no texts; or `tokens` are not as many as the
            pairs of the swaps. The model is then unchanged.
    """
    refuse_name(processor, "processor")
    processor = own_tokenizer(processor)
    return absorb_rows(model, processor, _rows(model, processor, texts), tokens=tokens)


def absorb_rows(
    model: nn.Module, processor: Any, rows: Sequence[Tensor], *, tokens: Sequence[int] | None = None
) -> Absorbed:
    """As `absorb_sink`, on the tokens of texts, (1,L) each.

    Raises:
        ValueError: as `absorb_sink`.
    """
    if not rows:
        raise ValueError("there is no text of two tokens or more; pass a few texts like those that the model reads.")
    installation = need_installation(model)
    sinks = _sinks(installation)
    count = next(iter(sinks.values()))[0].options.tokens
    if tokens is not None and len(tokens) != count:
        raise ValueError(f"the swaps have {count} pairs and {len(tokens)} tokens were given; give as many.")
    with evaluating(model), torch.no_grad():
        with installation.stock():
            _check_positions(model, rows[0], count)
            before = _measure(model, rows, ())
            if tokens is None:
                chosen, after = _search(model, processor, rows, count)
            else:
                chosen = tuple(map(int, tokens))
                after = _measure(model, rows, chosen)
        pairs = _pairs(model, installation, chosen)
        tried = _with_pairs(installation, pairs, chosen)
        short = rows[0][:, :SHORT]
        with installation.temporarily(tried):
            got = _output(model, short)
            scores = _mean_scores(model, tried, rows) if _constant(sinks) else {}
        _check_pairs(model, installation, chosen, short, got)
        for layer, copies in sinks.items():
            for sink in copies:
                _write(sink, pairs[layer], scores.get(layer))
    return Absorbed(
        tokens=chosen,
        words=tuple(processor.decode([token]) for token in chosen),
        before=before.largest,
        after=after.largest,
        massive=(before.massive, after.massive),
    )


def _sinks(installation: Installation) -> dict[Layer, list[Sink]]:
    """The sinks of every layer; several where PEFT keeps copies of a layer.

    Raises:
        ValueError: a layer has no sink of keys and values, or another number of pairs than the others; the model is no
            causal decoder with one module for each layer; or a weight is offloaded.
    """
    every = swappable(installation)
    if any(layer.site.kind is not Kind.DECODER or layer.site.family.shared for layer in every):
        raise ValueError(
            "a token before the text stands for a pair only in a causal language model whose layers have weights of "
            "their own, and this model has other attention; train the sink instead."
        )
    by_layer: dict[Layer, list[Sink]] = {}
    for layer in every:
        at = [swap.at("keys") for swap in layer.copies]
        sinks = [sink for sink in at if isinstance(sink, Sink) and sink.options.kind in KINDS]
        if sinks and len(sinks) == len(layer.copies):
            by_layer[layer] = sinks
    if missing := len(every) - len(by_layer):
        raise ValueError(
            f"{missing} of {len(every)} attention layers have no sink of keys and values, so the model could not "
            "be the stock model on a token and the text; patch all layers with sink first."
        )
    sinks = [sink for copies in by_layer.values() for sink in copies]
    if len({sink.options.tokens for sink in sinks}) > 1:
        raise ValueError("the layers have different numbers of pairs; patch all layers with the same tokens=.")
    if any(parameter.is_meta for sink in sinks for parameter in sink.parameters()):
        raise ValueError("weights of the swaps are offloaded; absorb the sink before the model is dispatched.")
    return by_layer


def _rows(model: nn.Module, processor: Any, texts: Iterable[str]) -> list[Tensor]:
    """The tokens of the first texts with two tokens or more, (1,L) each, on the model's device."""
    device = next(model.parameters()).device
    rows = []
    for _, text in zip(range(TEXTS), texts, strict=False):
        ids = torch.tensor([processor(text).input_ids[:LENGTH]], device=device)
        if ids.shape[1] > 1:
            rows.append(ids)
    return rows


def _check_positions(model: Any, row: Tensor, count: int) -> None:
    """Compare the outputs of a text with those at later positions.

    Raises:
        ValueError: the outputs differ, or the model takes no positions.
    """
    row = row[:, :SHORT]
    places = torch.arange(row.shape[1], device=row.device)[None]
    try:
        here = _output(model, row, position_ids=places)
        later = _output(model, row, position_ids=places + count)
        bound = MOVED if _half(here) else ROUNDING
        relative = bool((later - here).norm() <= bound * here.norm())
    except TypeError:  # the model takes no positions
        relative = False
    if not relative:
        raise ValueError(
            "this model's positions do not count relatively (a learned table, for example), so that no key stands for "
            "a token before the text; train the sink instead."
        )


def _search(model: Any, processor: Any, rows: Sequence[Tensor], count: int) -> tuple[tuple[int, ...], _Seen]:
    """The best list of `count` tokens, and what the texts show behind it: each is the best one behind those before it.

    The texts with the largest activations are read first, because most candidates fail on them.
    """
    candidates = _candidates(processor, rows)
    best: tuple[int, ...] = ()
    for _ in range(count):
        front, least = best, None
        for candidate in candidates:
            measured = _measure(model, rows, (*front, candidate), None if least is None else least.order)
            if least is None or measured.order < least.order:
                best, least = (*front, candidate), measured
                order = sorted(range(len(rows)), key=measured.of_rows.__getitem__, reverse=True)
                rows = [rows[place] for place in order]
    assert least is not None
    return best, least


def _candidates(processor: Any, rows: Sequence[Tensor]) -> list[int]:
    """Tokens that may serve as sinks, each once."""
    written = [processor(text, add_special_tokens=False).input_ids for text in ("\n", ".", " ")]
    special = [ids[-1] for ids in written if ids] + list(processor.all_special_ids)
    return list(dict.fromkeys([*special, *(int(row[0, 0]) for row in rows)]))


def _output(model: Any, ids: Tensor, **given: Any) -> Tensor:
    """The logits, or the last hidden states of a model without a head: (B,L,...)."""
    output: Tensor = model(input_ids=ids, use_cache=False, return_dict=True, **given)[0]
    return output


def _half(tensor: Tensor) -> bool:
    """True for bf16 and fp16."""
    return torch.finfo(tensor.dtype).bits == 16


def _behind(tokens: tuple[int, ...], row: Tensor) -> Tensor:
    """The tokens and a text (1,L) behind them."""
    return torch.cat([torch.tensor([tokens], dtype=row.dtype, device=row.device), row], 1)


def _measure(
    model: Any, rows: Sequence[Tensor], tokens: tuple[int, ...], least: tuple[int, float] | None = None
) -> _Seen:
    """What the stock model's blocks give on the texts, with these tokens before each.

    If `least` is given, the texts end as soon as the order is above it: no further text makes it smaller.
    """
    measured = _Seen((), 0, ())
    few: dict[str, Any] = {"logits_to_keep": 1} if can_skip_logits(model_root(model)) else {}
    for row in rows:
        ids = _behind(tokens, row)
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False, return_dict=True, **few).hidden_states
        blocks = states[1:-1] or states[1:]  # the last one is normed
        sizes = [state[0, len(tokens) :].abs().float() for state in blocks]
        tops = torch.stack([size.amax(-1) for size in sizes])  # (layers,L)
        medians = torch.stack([size.median() for size in sizes])[:, None]
        massive = int(((tops > LARGE) & (tops > MASSIVE * medians)).any(0).sum())
        own = tops.amax(1).tolist()
        largest = map(max, measured.largest, own) if measured.largest else own
        measured = _Seen(tuple(largest), measured.massive + massive, (*measured.of_rows, max(own)))
        if least is not None and measured.order > least:
            break
    return measured


def _pairs(model: Any, installation: Installation, tokens: tuple[int, ...]) -> dict[Layer, Pair]:
    """The keys and values that the stock layers compute for the tokens at the positions -n to -1, by the layer."""
    watched = softmax_swaps(installation)
    pairs: dict[Layer, Pair] = {}

    def keep(layer: Layer) -> Any:
        def hook(swap: nn.Module, args: tuple[Any, ...]) -> None:
            pairs[layer] = args[0].key[0].clone(), args[0].value[0].clone()

        return hook

    ids = _behind(tokens, torch.empty(1, 0, dtype=torch.long, device=next(model.parameters()).device))
    places = torch.arange(-len(tokens), 0, device=ids.device)[None]
    with installation.temporarily(watched), contextlib.ExitStack() as hooked:
        for layer, swap in watched.items():
            hooked.callback(swap.register_forward_pre_hook(keep(layer)).remove)
        _output(model, ids, position_ids=places)
    return pairs


def _with_pairs(installation: Installation, pairs: dict[Layer, Pair], tokens: tuple[int, ...]) -> dict[Layer, Swap]:
    """A swap with these pairs alone for every layer.

    Raises:
        ValueError: a layer has no such pairs.
    """
    classes = parse("sink")
    options = parse_options(classes, {"tokens": len(tokens)})
    tried = {layer: build_swap(layer, classes, options) for layer in installation.layers()}
    for layer, swap in tried.items():
        sink = swap.at("keys")
        assert isinstance(sink, Sink)
        if layer not in pairs or not _fits(sink, pairs[layer]):
            raise ValueError(NOT_STOCK)
        _write(sink, pairs[layer])
    return tried


def _check_pairs(model: Any, installation: Installation, tokens: tuple[int, ...], row: Tensor, got: Tensor) -> None:
    """Compare what a model with the pairs gives on a short text with the stock model on the tokens and the text.

    Raises:
        ValueError: the outputs differ by more than rounding.
    """
    with installation.stock():
        wanted = _output(model, _behind(tokens, row))[:, len(tokens) :]
        without = _output(model, row)
    bound = SHARE * (without - wanted).norm() if _half(got) else ROUNDING * wanted.norm()
    if not (got - wanted).norm() <= bound:
        raise ValueError(NOT_STOCK)


def _mean_scores(model: Any, swaps: dict[Layer, Swap], rows: Sequence[Tensor]) -> dict[Layer, Tensor]:
    """The mean score of the pair of each layer over the queries of the texts, (H,N); `swaps` are in their layers."""
    sums: dict[Layer, Tensor] = {}
    queries = sum(row.shape[1] for row in rows)

    def add(layer: Layer) -> Any:
        def hook(swap: Any, args: tuple[Any, ...]) -> None:
            inputs, call = args[:2]
            scores = swap.at("keys").extra_kv(inputs, call).scores(inputs).sum((0, 2))
            sums[layer] = sums.get(layer, 0) + scores / queries

        return hook

    with contextlib.ExitStack() as hooked:
        for layer, swap in swaps.items():
            hooked.callback(swap.register_forward_pre_hook(add(layer)).remove)
        for row in rows:
            _output(model, row)
    return sums


def _constant(sinks: dict[Layer, list[Sink]]) -> bool:
    """True if the sinks have scores in place of keys."""
    return any(sink.options.kind != KINDS[0] for copies in sinks.values() for sink in copies)


def _fits(sink: Any, pair: Pair) -> bool:
    """True if the pairs have the sizes of a sink."""
    return [tensor.shape for tensor in pair] == [sink.learned.key.shape, sink.learned.value.shape]


def _write(sink: Sink, pair: Pair, score: Tensor | None = None) -> None:
    """Give a sink these keys and values; or this score in place of the keys."""
    key, value, own_score = sink.learned()
    assert value is not None
    value.copy_(pair[1])
    if own_score is not None:
        assert score is not None
        own_score.copy_(score)
    else:
        assert key is not None
        key.copy_(pair[0])


# -- The step of a conversion ------------------------------------------------------------------------------------------


def absorb(run: Run, measure: Callable[[Run], Lost] | None = None, before: Lost | None = None) -> None:
    """Give the variant an absorbed sink, where one can stand in all layers and less is lost with it.

    The first token of a text is a sink for the heads, and a swap disturbs it most. With the keys and values of one
    token beside the text, `sink+outeffhop` starts from less loss than `outeffhop`. Nothing is trained.

    Args:
        run: the conversion, with the swap alone.
        measure: what is lost in 8 bits, and always tried; None tries no sink if the swap alone is within the budget.
        before: what `measure` gave without a sink, where nothing but a sink is converted: the loss in 8 bits with it
            then stands in the report.
    """
    if not _may_have_sink(run) or (measure is None and run.within):
        return
    last = before is not None
    tokens = run.apply("choose a sink", partial(_choose_sink, run, measure, before), measured=last)
    if tokens is not None:
        run.apply("sink absorbed", partial(_put_sink, run, tokens), measured=not last, again=True)


def _may_have_sink(run: Run) -> bool:
    """True if a sink may be tried: for texts, in all layers, with a variant that leaves the keys free or is one."""
    config = run.config
    if not config.absorb or run.rows.unit != TOKENS or not hasattr(config.processor, "all_special_ids"):
        return False
    chosen = config.layers is not None or config.modules is not None
    if chosen or (config.keep and config.target is None):
        return False
    layers = run.installation.layers()
    return all(layer.site.kind is Kind.DECODER for layer in layers) and _with_sink(config) is not None


def _with_sink(config: ConvertConfig) -> tuple[str, dict[str, Any]] | None:
    """The variant with a sink before it, and its options; None if the variant composes with no sink."""
    classes = parse(config.variant)
    if Sink in classes:
        return config.variant, config.options
    if config.target is not None:  # a pair that turns with the query could not leave
        return None
    if config.quantized and classes == (Softmax,):
        return Sink.name, {}
    name = f"{Sink.name}+{config.variant}"
    with contextlib.suppress(ValueError):
        parse(name)
        return name, canonical_keys(config.options) if len(classes) > 1 else {config.variant: config.options}
    return None


def _choose_sink(run: Run, measure: Callable[[Run], Lost] | None, before: Lost | None) -> list[int] | None:
    """The tokens that serve as a sink, or None. The model stays as it is."""
    config, name = run.config, "in 8 bits, with a sink"
    enough = before is not None or not config.budgeted  # else groups of layers may be chosen
    if before is None:
        before = run.record[-1].lost if measure is None else measure(run)
    with run.trial(name, before, undo=partial(replace_swaps, run.model, config.variant, config.options)):
        try:
            _patch_sink(run)
            absorbed = absorb_rows(run.model, config.processor, _first_rows(run))
        except ValueError as problem:
            run.say(f"No sink was absorbed: {problem}")
            return None
        lost = run.lost() if measure is None else measure(run)
    if (enough or config.allows(lost)) and lost.degradation < before.degradation:
        run.say(str(absorbed))
        run.measured(name, lost)
        return list(absorbed.tokens)
    return None


def _put_sink(run: Run, tokens: list[int]) -> None:
    """Put the swaps with the chosen sink instead of the others."""
    _patch_sink(run)
    absorb_rows(run.model, run.config.processor, _first_rows(run)[:1], tokens=tokens)


def _patch_sink(run: Run) -> None:
    composed = _with_sink(run.config)
    assert composed is not None
    replace_swaps(run.model, *composed)


def _first_rows(run: Run) -> list[Tensor]:
    """The real tokens of the first training rows, (1,L) each."""
    device = next(run.model.parameters()).device
    rows = []
    for place in range(min(TEXTS, len(run.rows))):
        row = run.rows.rows[place]
        ids = torch.as_tensor(row["input_ids"])
        if "attention_mask" in row:
            ids = ids[torch.as_tensor(row["attention_mask"]).bool()]
        if len(ids) > 1:
            rows.append(ids[None, :LENGTH].to(device))
    return rows
