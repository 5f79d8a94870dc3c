"""Step 3: the sink of a pretrained language model made explicit, if the swapped model then loses less.

The first token of a text is a sink for the heads, and a swap disturbs it most. With the keys and values of one token
beside the text (`absorb_sink`), `sink+outeffhop` starts from less loss than `outeffhop`. Nothing is trained.
docs/mathematics.md, section Sinks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...core.kind import Kind
from ...layer.registry import canonical_keys, parse
from ...patch import need_installation, replace_swaps
from ...variants.sink import Sink
from ...variants.softmax import Softmax
from ..absorb import LENGTH, TEXTS, absorb_rows
from ..bits import lost_in_bits
from ..engine import Part
from ..rows import TOKENS
from ..state import State


def absorb(state: State) -> Iterator[Part]:
    """Give the variant an absorbed sink, where one can stand in all layers and less is lost with it."""
    if not _may(state):
        return
    yield Part("choose a sink", _choose, measured=False)
    if state.notes["sink"] is not None:
        yield Part("sink absorbed", _put, again=True)


def _may(state: State) -> bool:
    """True if a sink may be tried: for texts, in all layers, beside a variant that leaves the keys free or is one.

    If the swap alone is within the budget, nothing is tried.
    """
    config = state.config
    if not config.absorb or state.rows.unit != TOKENS or not hasattr(config.processor, "all_special_ids"):
        return False
    if config.layers is not None or config.modules is not None or config.keep:
        return False
    if state.within and config.bits is None:
        return False
    every = need_installation(state.model).layers()
    return all(layer.site.kind is Kind.DECODER for layer in every) and _with_sink(state) is not None


def _with_sink(state: State) -> tuple[str, dict[str, Any]] | None:
    """The variant with a sink before it, and its options; None if the variant composes with no sink."""
    config = state.config
    classes = parse(config.variant)
    if Sink in classes:
        return config.variant, config.options
    if config.bits is not None and classes == (Softmax,):
        return Sink.name, {}
    name = f"{Sink.name}+{config.variant}"
    with contextlib.suppress(ValueError):
        parse(name)
        own = canonical_keys(config.options) if len(classes) > 1 else {config.variant: config.options}
        return name, own
    return None


def _choose(state: State) -> None:
    """Note the tokens that serve as a sink, or None. The model stays as it is."""
    state.notes["sink"] = None
    measure = State.lost if state.config.bits is None else lost_in_bits
    swapped = state.record[-1].lost if state.config.bits is None else lost_in_bits(state)
    try:
        _patch(state)
        found = absorb_rows(state.model, state.config.processor, _first_rows(state))
    except ValueError as problem:
        state.say(f"No sink was absorbed: {problem}")
    else:
        lost = measure(state)
        enough = not state.config.budgeted or state.config.allows(lost)  # else groups of layers are chosen
        if lost.degradation < swapped.degradation and enough:
            state.notes["sink"] = list(found.tokens)
            state.say(str(found))
    finally:
        replace_swaps(state.model, state.config.variant, state.config.options)


def _put(state: State) -> None:
    """Put the swaps with the chosen sink instead of the others."""
    _patch(state)
    absorb_rows(state.model, state.config.processor, _first_rows(state)[:1], tokens=state.notes["sink"])


def _patch(state: State) -> None:
    composed = _with_sink(state)
    assert composed is not None
    replace_swaps(state.model, *composed)


def _first_rows(state: State) -> list[Tensor]:
    """The real tokens of the first training rows, (1,L) each."""
    device = next(state.model.parameters()).device
    found = []
    for place in range(min(TEXTS, len(state.rows))):
        row = state.rows.rows[place]
        ids = torch.as_tensor(row["input_ids"])
        if "attention_mask" in row:
            ids = ids[torch.as_tensor(row["attention_mask"]).bool()]
        if len(ids) > 1:
            found.append(ids[None, :LENGTH].to(device))
    return found
