"""Step 4: the key/value heads that keep all keys. What each head alone costs decides.

Retrieval lives in few heads (Wu et al., 2024), and the others need the keys near a query and the first ones alone:
DuoAttention (Xiao et al., 2024) gives a window to these. docs/mathematics.md, section Which layers.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..engine import Part
from ..full_heads import set_full_heads
from ..rows import TOKENS
from ..sensitivity import head_sensitivity
from ..state import State

FEW_TOKENS = 512  # of rows, for each head: there are several times as many heads as layers
FEW_ROWS = 8  # of other data
FEW_PASSAGES = 2


def heads(state: State) -> Iterator[Part]:
    """Choose the heads, and let them keep all keys."""
    if state.config.heads is not None:
        yield Part("heads", _choose, measured=False)
        yield Part("heads chosen", _put, again=True)


def _choose(state: State) -> None:
    assert state.held is not None
    rows = max(1, round(FEW_TOKENS / state.rows.length)) if state.rows.unit == TOKENS else FEW_ROWS
    costs = head_sensitivity(state.model, state.held.subset_of_rows(rows, FEW_PASSAGES), progress=state.progress)
    order = costs.order
    count = min(round(state.config.keep * len(order)), len(order) - 1)
    full = sorted(order[len(order) - count :])
    state.notes["head_sensitivity"] = costs.to_dict()
    state.notes["full_heads"] = [list(head) for head in full]
    state.say(
        f"{count} of {len(order)} key/value heads keep all keys (layer.head): {', '.join(map(costs.name_of, full))}."
    )


def _put(state: State) -> None:
    """A layer whose heads all keep all keys runs its own attention, as a layer that was not chosen."""
    installation, strengths = state.installation, {}
    for layer in installation.layers():
        full = [head for number, head in state.notes["full_heads"] if number == layer.number]
        set_full_heads(layer, full)
        strengths[layer] = 0.0 if len(full) == layer.swap.geometry.kv_heads else 1.0
    installation.set_strength(strengths)
