"""Step 6: the layers that are converted, in groups. What each layer alone costs decides, if there is a choice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from ..engine import Part
from ..sensitivity import layer_sensitivity
from ..split import FEWEST_HELD
from ..state import State

GROUPS = 6  # of layers, when a budget decides how many layers are converted


def choose(state: State) -> Iterator[Part]:
    """Note the groups of layers in their order, and whether the budget chooses among them."""
    yield Part("choose", _choose, measured=False)


def _choose(state: State) -> None:
    config, layers = state.config, list(state.layers)
    keep = 0.0 if config.heads is not None else config.keep  # else it is a share of heads, which are chosen already
    choosing = config.layers is None and config.budgeted and not state.within
    state.notes["choosing"] = choosing
    if not keep and not choosing:
        state.notes["groups"] = [layers]
        return
    assert state.held is not None
    subset = state.held.subset(max(FEWEST_HELD // 2, len(state.held.kept) // 4))  # there is a pass per layer
    sensitivity = layer_sensitivity(state.model, subset, layers=layers, progress=state.progress)
    state.notes["sensitivity"] = sensitivity.to_dict()
    order = list(sensitivity.order)
    order = order[: len(order) - round(keep * len(order))] or order[:1]
    if not choosing:
        state.notes["groups"] = [sorted(order)]
        return
    count = min(GROUPS, len(order))
    cuts = [round(place * len(order) / count) for place in range(count + 1)]
    state.notes["groups"] = [order[first:last] for first, last in itertools.pairwise(cuts)]
