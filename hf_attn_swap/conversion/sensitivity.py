"""Measures what each layer, or each key/value head, alone costs, and chooses by it what is converted.

A layer, or a head, runs the variant alone, and all others run none. Layers whose swap costs little are good candidates
for a conversion; the costliest layers are best kept as they are. Where a variant hides keys of a causal language model,
recall counts as much as KL: perplexity hardly shows its loss. A head runs its variant alone where all others keep all
keys, by the option `full_heads`, which each forward pass reads: nothing is wired anew.

Retrieval lives in few heads (Wu et al., 2024), and the others need the keys near a query and the first ones alone:
DuoAttention (Xiao et al., 2024), section 2, gives a window to these. The method is this package's own, after the
published hybrids that keep a part of the softmax layers; docs/mathematics.md, section Which layers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..layer.registry import build_options, parse, parse_options
from ..measuring.held_out import HeldOut
from ..measuring.lost import Lost
from ..measuring.recall import LENGTH, Passages
from ..patch import need_installation
from ..text.bar import bar
from ..wiring.install import Installation
from ..wiring.layers import Layer
from .config import FULL_HEADS, by_heads
from .replay import Replay, block_of
from .report import Sensitivity
from .rows import FEWEST_HELD, TOKENS
from .run import Run

DISTANCE = 200  # tokens between the two readings of a passage, unless a window is wider
HEAD_TOKENS = 512  # of rows, for each head: there are several times as many heads as layers
HEAD_ROWS = 8  # of other data
HEAD_PASSAGES = 2
RECALLED = 0.99  # of the recall is left after all exchanges of heads
GROUPS = 6  # of layers, when a budget decides how many layers are converted


def layer_sensitivity(
    model: nn.Module, batches: Iterable[Any] | HeldOut, *, layers: Iterable[int] | None = None, progress: bool = True
) -> Sensitivity:
    """Measure what each swapped layer alone costs. The model does not change.

    Calibrate the model first: the order of the layers is that of the fitted swap. In a causal language model whose
    variant hides keys (a window, or linear attention), recall is measured too, if the rows and the model are long
    enough for it. docs/mathematics.md, section Which layers.

    Args:
        model: a patched model whose weights no conversion has trained.
        batches: a few dicts of tensors as the model takes them, or `HeldOut` rows, which measure recall if they have
            passages. Each layer is one pass over them.
        layers: the numbers of the swapped layers to measure; None means all.
        progress: show a progress bar.

    Raises:
        ValueError: the model is not patched, was changed by a conversion; a layer is not swapped;
            or there is no batch.
    """
    installation, chosen = _swapped(model, layers)
    held = _held_out(model, installation, batches, progress)
    alone, together = _measured(model, installation, chosen, [(layer, None) for layer in chosen], held, progress)
    return Sensitivity(variant=_names(chosen), together=together, alone=alone)


def head_sensitivity(
    model: nn.Module, batches: Iterable[Any] | HeldOut, *, layers: Iterable[int] | None = None, progress: bool = True
) -> Sensitivity:
    """Measure what each key/value head of the swapped layers alone costs. The model does not change.

    As `layer_sensitivity`, with a pass over the rows for each key/value head: this head has the variant, and all other
    heads are those of the pretrained model. The variant must have the option `full_heads`, as `window` has.
    DuoAttention (Xiao et al., 2024) trains a gate per head for this choice; here, each head is measured.
    docs/mathematics.md, section Which layers.

    Args:
        model: a patched model whose weights no conversion has trained, without fits.
        batches: as in `layer_sensitivity`; few rows are enough.
        layers: the numbers of the swapped layers to measure; None means all.
        progress: show a progress bar.

    Raises:
        ValueError: as `layer_sensitivity`; or the variant has no such option, or a layer has a fit, which would be that
            of other heads.
    """
    installation, chosen = _swapped(model, layers)
    for layer in chosen:
        _check_full_heads(layer)
    held = _held_out(model, installation, batches, progress)
    units = [(layer, head) for layer in chosen for head in range(layer.swap.geometry.kv_heads)]
    alone, together = _measured(model, installation, chosen, units, held, progress)
    return Sensitivity(variant=_names(chosen), together=together, alone=alone)


def _swapped(model: nn.Module, layers: Iterable[int] | None) -> tuple[Installation, list[Layer]]:
    """The swapped layers that are measured.

    Raises:
        ValueError: as `layer_sensitivity`, for another reason than its rows.
    """
    installation = need_installation(model)
    swapped = {layer.number: layer for layer in installation.layers()}
    chosen = sorted(swapped if layers is None else layers)
    if missing := [index for index in chosen if index not in swapped]:
        raise ValueError(f"layers {missing} are not swapped; swapped are {sorted(swapped)}.")
    if any(layer.swap.retrained for layer in swapped.values()):
        raise ValueError("a conversion changed weights of this model; measure the layers before the distillation.")
    return installation, [swapped[index] for index in chosen]


def _names(layers: Iterable[Layer]) -> str:
    return ", ".join(sorted({"+".join(layer.swap.names) for layer in layers}))


def _measured(
    model: nn.Module,
    installation: Installation,
    layers: Sequence[Layer],
    units: Sequence[tuple[Layer, Any]],
    held: HeldOut,
    progress: bool,
) -> tuple[dict[int | str, Lost], Lost]:
    """What is lost while one unit runs the variant, by the layer's number or as "layer.head"; and while all run it.

    Args:
        model: the patched model.
        installation: its swaps.
        layers: all layers that are measured.
        units: each a layer, and a key/value head of it or None for the whole layer.
        held: the rows.
        progress: show a progress bar.
    """
    alone: dict[int | str, Lost] = {}
    swapped = installation.layers()
    with installation.strengths_kept():
        installation.set_strength(dict.fromkeys(swapped, 0.0))
        replay = Replay.of(installation, held)
        for layer, head in bar(units, desc="sensitivity", shown=progress):
            installation.set_strength(dict.fromkeys(swapped, 0.0) | {layer: 1.0})
            with contextlib.ExitStack() as inside:
                if head is not None:
                    inside.enter_context(_one_head(layer, head))
                if replay is not None:
                    inside.enter_context(replay.below(block_of(installation.root, layer)[1]))
                alone[layer.number if head is None else f"{layer.number}.{head}"] = held.lost(model)
        installation.set_strength(dict.fromkeys(swapped, 0.0) | dict.fromkeys(layers, 1.0))
        return alone, held.lost(model)


def _held_out(
    model: nn.Module, installation: Installation, batches: Iterable[Any] | HeldOut, progress: bool
) -> HeldOut:
    """The rows, with passages where the variants of the model hide keys and there is room for passages."""
    if isinstance(batches, HeldOut):
        return batches
    rows: list[Any] = [batches] if isinstance(batches, Mapping) else list(batches)
    swaps = [layer.swap for layer in installation.layers()]
    reach = _least(variant.reach(variant.options) for swap in swaps for variant in swap.variants)
    passages = None
    if reach is not None:
        with contextlib.suppress(ValueError):
            passages = passages_beyond(model, rows, reach)
    with installation.stock():
        return HeldOut(model, rows, as_it_is=True, passages=passages, progress=progress)


# -- Heads that keep all keys ------------------------------------------------------------------------------------------


def _check_full_heads(layer: Layer) -> str:
    """The name of the variant of a swapped layer that can leave heads as they are.

    Raises:
        ValueError: no variant can, or the layer has a fit.
    """
    if layer.swap.fitted:
        raise ValueError(
            f"layer {layer.number} has a fit ({', '.join(layer.swap.fitted)}), which is that of other heads; choose "
            "the heads before the fit."
        )
    return by_heads(type(variant) for variant in layer.swap.variants)


def set_full_heads(layer: Layer, heads: Iterable[int]) -> None:
    """Let exactly these key/value heads of a swapped layer keep all keys. `Installation.refresh` has to follow.

    Args:
        layer: the layer.
        heads: the numbers of the heads, from 0.

    Raises:
        ValueError: as in `_check_full_heads`.
    """
    name, heads = _check_full_heads(layer), sorted(heads)
    for swap in layer.copies:
        swap.set_options({**swap.options, name: {**swap.options[name], FULL_HEADS: heads}})


@contextlib.contextmanager
def _one_head(layer: Layer, head: int) -> Iterator[None]:
    """Inside the `with` block, all other key/value heads of a swapped layer keep all keys.

    Raises:
        ValueError: as in `_check_full_heads`.
    """
    before = [(swap, swap.options) for swap in layer.copies]
    set_full_heads(layer, set(range(layer.swap.geometry.kv_heads)) - {head})
    try:
        yield
    finally:
        for swap, options in before:
            swap.set_options(options)


# -- Passages beyond the keys that a query sees ------------------------------------------------------------------------


def reach_of(variant: str, options: Mapping[str, Any]) -> int | None:
    """How many of the last keys a query sees with a variant or a composition; None if no key is hidden.

    Args:
        variant: the name.
        options: as `patch_model` takes them.
    """
    classes = parse(variant)
    by_variant = parse_options(classes, options)
    return _least(cls.reach(build_options(cls, by_variant[cls.name])) for cls in classes)


def _least(reaches: Iterable[int | None]) -> int | None:
    """The smallest of some numbers, or None."""
    return min((reach for reach in reaches if reach is not None), default=None)


def passages_beyond(model: nn.Module, rows: Iterable[Any], reach: int | None, distance: int | None = None) -> Passages:
    """Passages that are read again where a query no longer sees them.

    Args:
        model: a causal language model.
        rows: token ids, as `recall` takes them.
        reach: how many of the last keys a query sees; None for all.
        distance: the tokens between the two readings; None is `DISTANCE`, or the reach of a wider window.

    Raises:
        ValueError: as `recall`: the model is no causal language model, or the rows or the model are too short. Or a
            query still sees the whole passage after this distance.
    """
    if distance is not None and reach is not None and distance + LENGTH <= reach:
        raise ValueError(
            f"a query sees the last {reach:,} keys, and so the whole passage of {LENGTH} tokens after {distance:,} "
            f"tokens; take at least {reach - LENGTH + 1:,}."
        )
    return Passages.of(model, rows, (distance or max(DISTANCE, reach or 0),))


# -- The steps of a conversion -----------------------------------------------------------------------------------------


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


def select_heads(run: Run) -> Sensitivity | None:
    """Choose the key/value heads that keep all keys, and return what each head alone costs; None without `heads`.

    First the costliest heads, then exchanges of single heads while less is lost by all together.
    """
    if run.config.heads is None:
        return None
    sensitivity = run.apply("heads", partial(_head_sensitivity, run), measured=False, read=Sensitivity.from_dict)
    order = sensitivity.order
    count = min(round(run.config.keep * len(order)), len(order) - 1)
    costliest = order[len(order) - count :]
    full = run.apply("exchanged", partial(_exchanged, run, sensitivity, costliest), measured=False)
    run.apply("heads chosen", partial(_keep_all_keys, run, full), again=True)
    run.say(f"{count} of {len(order)} key/value heads keep all keys (layer.head): {', '.join(full)}.")
    return sensitivity


def _head_sensitivity(run: Run) -> Sensitivity:
    return head_sensitivity(run.model, _few_rows(run), progress=run.progress)


def _few_rows(run: Run) -> HeldOut:
    """The rows on which heads are measured."""
    assert run.held is not None
    rows = max(1, round(HEAD_TOKENS / run.rows.length)) if run.rows.unit == TOKENS else HEAD_ROWS
    return run.held.subset_of_rows(rows, HEAD_PASSAGES)


def _exchanged(run: Run, sensitivity: Sensitivity, costliest: Iterable[str]) -> list[str]:
    """The heads that keep all keys, after exchanges of the least useful kept head for the most useful other head.

    The use of a kept head is what more is lost without it; of another head, what less is lost if it is kept, too. Each
    is measured once. An exchange stays if less is lost, and not more than a hundredth of the recall.
    docs/mathematics.md, section Which layers.
    """
    layers = {str(layer.number): layer for layer in run.installation.layers()}
    held, kept = _few_rows(run), set(costliest)

    def measure(heads: Container[str]) -> Lost:
        _keep_all_keys(run, heads)
        return held.lost(run.model)

    def worth(head: str) -> float:
        """The loss without a head less the loss with it, while the other chosen heads keep all keys."""
        block = block_of(run.installation.root, layers[head.partition(".")[0]])[1]
        with contextlib.nullcontext() if replay is None else replay.below(block):
            more = sensitivity.share(measure(kept ^ {head})) - least
        return more if head in kept else -more

    with run.installation.strengths_kept():
        first = measure(kept)
        least, replay = sensitivity.share(first), Replay.of(run.installation, held)
        worths = {head: worth(head) for head in bar(sensitivity.alone, desc="heads together", shown=run.progress)}
        order = sorted(worths, key=worths.__getitem__, reverse=True)
        useless = [head for head in order if head in kept]
        for head in [head for head in order if head not in kept][: 2 * len(kept)]:
            if not useless or worths[head] <= worths[useless[-1]]:
                break
            lost = measure(kept ^ {head, useless[-1]})
            recalls = lost.recall is None or first.recall is None or lost.recall >= RECALLED * first.recall
            if recalls and sensitivity.share(lost) < least:
                kept, least = kept ^ {head, useless.pop()}, sensitivity.share(lost)
        _keep_all_keys(run, ())
    return [head for head in sensitivity.alone if head in kept]


def _keep_all_keys(run: Run, heads: Container[str]) -> None:
    """A layer whose heads all keep all keys runs its own attention, as a layer that was not chosen."""
    strengths = {}
    for layer in run.installation.layers():
        of_layer = range(layer.swap.geometry.kv_heads)
        full = [head for head in of_layer if f"{layer.number}.{head}" in heads]
        set_full_heads(layer, full)
        strengths[layer] = 0.0 if len(full) == len(of_layer) else 1.0
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
