"""Selects the heads that keep all keys, and the groups of layers that are converted: by what each alone costs.

Retrieval lives in few heads (Wu et al., 2024), and the others need the keys near a query and the first ones alone:
DuoAttention (Xiao et al., 2024) gives a window to these. docs/mathematics.md, section Which layers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

from .rows import TOKENS
from .run import Run
from .sensitivity import HeadSensitivity, Sensitivity, head_sensitivity, layer_sensitivity, set_full_heads
from .split import FEWEST_HELD

HEAD_TOKENS = 512  # of rows, for each head: there are several times as many heads as layers
HEAD_ROWS = 8  # of other data
HEAD_PASSAGES = 2
GROUPS = 6  # of layers, when a budget decides how many layers are converted


@dataclass(frozen=True)
class LayerSelection:
    """The layers that are converted.

    Attributes:
        groups: the numbers of the layers, group by group in their order.
        by_budget: True if the budget decides how many of the groups are converted.
        sensitivity: what each layer alone costs; None if no layers had to be chosen.
    """

    groups: list[list[int]]
    by_budget: bool = False
    sensitivity: Sensitivity | None = None

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> LayerSelection:
        """A selection from its plain data, also after JSON."""
        sensitivity = values["sensitivity"]
        return cls(**{**values, "sensitivity": sensitivity and Sensitivity.from_dict(sensitivity)})


def select_heads(run: Run) -> HeadSensitivity | None:
    """Let the key/value heads keep all keys that cost most, and return what each costs; None if that was not asked."""
    if run.config.heads is None:
        return None
    sensitivity = run.apply("heads", partial(_head_sensitivity, run), measured=False, read=HeadSensitivity.from_dict)
    order = sensitivity.order
    count = min(round(run.config.keep * len(order)), len(order) - 1)
    full = sorted(order[len(order) - count :])
    run.apply("heads chosen", partial(_keep_all_keys, run, full), again=True)
    names = ", ".join(map(sensitivity.name_of, full))
    run.say(f"{count} of {len(order)} key/value heads keep all keys (layer.head): {names}.")
    return sensitivity


def _head_sensitivity(run: Run) -> HeadSensitivity:
    assert run.held is not None
    rows = max(1, round(HEAD_TOKENS / run.rows.length)) if run.rows.unit == TOKENS else HEAD_ROWS
    return head_sensitivity(run.model, run.held.subset_of_rows(rows, HEAD_PASSAGES), progress=run.progress)


def _keep_all_keys(run: Run, heads: list[tuple[int, int]]) -> None:
    """A layer whose heads all keep all keys runs its own attention, as a layer that was not chosen."""
    strengths = {}
    for layer in run.installation.layers():
        full = [head for number, head in heads if number == layer.number]
        set_full_heads(layer, full)
        strengths[layer] = 0.0 if len(full) == layer.swap.geometry.kv_heads else 1.0
    run.installation.set_strength(strengths)


def select_layers(run: Run) -> LayerSelection:
    """The groups of layers in their order, and whether the budget chooses among them."""
    return run.apply("choose", partial(_select_layers, run), measured=False, read=LayerSelection.from_dict)


def _select_layers(run: Run) -> LayerSelection:
    config, layers = run.config, list(run.layers)
    keep = 0.0 if config.heads is not None else config.keep  # else it is a share of heads, which are chosen already
    by_budget = config.layers is None and config.budgeted and not run.within
    if not keep and not by_budget:
        return LayerSelection([layers])
    assert run.held is not None
    held = run.held.subset(max(FEWEST_HELD // 2, len(run.held.kept) // 4))  # there is a pass per layer
    sensitivity = layer_sensitivity(run.model, held, layers=layers, progress=run.progress)
    order = list(sensitivity.order)
    order = order[: len(order) - round(keep * len(order))] or order[:1]
    if not by_budget:
        return LayerSelection([sorted(order)], sensitivity=sensitivity)
    count = min(GROUPS, len(order))
    cuts = [round(place * len(order) / count) for place in range(count + 1)]
    return LayerSelection([order[first:last] for first, last in itertools.pairwise(cuts)], True, sensitivity)
