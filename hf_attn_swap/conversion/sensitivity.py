"""Measures what each layer, or each key/value head, alone costs: it runs the variant, and all others run none.

Layers whose swap costs little are good candidates for a conversion; the costliest layers are best kept as they are.
Where a variant hides keys of a causal language model, recall counts as much as KL: perplexity hardly shows its loss.
The method is this package's own, after the published hybrids that keep a part of the softmax layers;
docs/mathematics.md, section Which layers. A head runs its variant alone where all others keep all keys, by the option
`full_heads`, which each forward pass reads: nothing is wired anew. DuoAttention (Xiao et al., 2024), section 2.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import nn

from ..layer.registry import build_options, canonical_name, parse, parse_options
from ..measuring.held_out import HeldOut
from ..measuring.lost import Lost
from ..measuring.recall import LENGTH, Passages
from ..patch import need_installation
from ..text.bar import bar
from ..text.table import Table
from ..variants.base import Variant
from ..wiring.install import Installation
from ..wiring.layers import Layer

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OPTION = "full_heads"
DISTANCE = 200  # tokens between the two readings of a passage, unless a window is wider
SIZE = (7.0, 3.2)  # of the picture, in inches


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """What each unit of a model alone costs: a layer, or a key/value head.

    Attributes:
        variant: the name of the variant.
        together: what was lost with all these units swapped.
    """

    variant: str
    together: Lost
    unit: ClassVar[str]

    @property
    def alone(self) -> dict[Any, Lost]:
        """What was lost with this unit alone swapped, by the unit."""
        raise NotImplementedError

    @property
    def order(self) -> tuple[Any, ...]:
        """The units, from the cheapest to the costliest.

        By KL or the relative error; if recall was measured, by the sum of both, each as a share of its total over the
        units. A unit without which the model recalls more costs no recall.
        """
        costs = _shares({unit: lost.divergence_or_error for unit, lost in self.alone.items()})
        recalls = _shares({unit: max(0.0, _recall_lost(lost)) for unit, lost in self.alone.items()})
        return tuple(sorted(costs, key=lambda unit: (costs[unit] + recalls[unit], unit)))

    def table(self) -> Table:
        """A row per unit, from the cheapest."""
        recalled = self.together.recall is not None
        named = [*((self.name_of(unit), self.alone[unit]) for unit in self.order), ("all", self.together)]
        return Table(
            summary=f"{self.variant}: what each {self.unit} alone costs, from the cheapest.",
            header=(self.unit, self.together.measure, *(["recall lost, nats"] if recalled else [])),
            rows=[
                (name, f"{lost.degradation:.3g}", *([f"{_recall_lost(lost):.3g}"] if recalled else []))
                for name, lost in named
            ],
        )

    def plot(self) -> Figure:
        """A bar per unit, in the order of the model; a colour for each head of a layer."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        heads: dict[int | None, dict[int, float]] = {}
        for unit, lost in self.alone.items():
            layer, head = unit if isinstance(unit, tuple) else (unit, None)
            heads.setdefault(head, {})[layer] = lost.degradation
        width = 0.9 / len(heads)
        for place, (head, costs) in enumerate(heads.items()):
            places = [layer + place * width for layer in costs]
            axes.bar(places, list(costs.values()), width, label=None if head is None else f"head {head}")
        if None not in heads:
            axes.legend(ncols=4, fontsize="small")
        axes.set(
            xlabel="layer",
            ylabel=self.together.measure,
            title=f"{self.variant}: what each {self.unit} alone costs",
        )
        return figure

    def name_of(self, unit: Any) -> str:
        """A unit in the table."""
        return str(unit)

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Sensitivity(_Costs):
    """What each layer alone costs.

    Attributes:
        variant: the name of the variant.
        together: what was lost with all these layers swapped.
        layers: what was lost with this layer alone swapped, by the layer's number.
    """

    layers: dict[int, Lost]
    unit: ClassVar[str] = "layer"

    @property
    def alone(self) -> dict[int, Lost]:
        """What was lost with this layer alone swapped, by the layer's number."""
        return self.layers

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sensitivity:
        """The figures from their plain data, also after JSON."""
        return cls(**_of_both(values), layers=_by_number(values["layers"]))


@dataclass(frozen=True, kw_only=True)
class HeadSensitivity(_Costs):
    """What each key/value head alone costs.

    Attributes:
        variant: the name of the variant.
        together: what was lost with all these heads swapped.
        heads: what was lost with this head alone swapped, by the layer's number and the number of the head in it.
    """

    heads: dict[int, dict[int, Lost]]
    unit: ClassVar[str] = "key/value head"

    @property
    def alone(self) -> dict[tuple[int, int], Lost]:
        """What was lost with this head alone swapped, by (layer, head)."""
        return {(layer, head): lost for layer, heads in self.heads.items() for head, lost in heads.items()}

    def name_of(self, unit: Any) -> str:
        """The numbers of the layer and of the head, such as 18.2."""
        return "{}.{}".format(*unit)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadSensitivity:
        """The figures from their plain data, also after JSON."""
        heads = {int(layer): _by_number(heads) for layer, heads in values["heads"].items()}
        return cls(**_of_both(values), heads=heads)


def _of_both(values: dict[str, Any]) -> dict[str, Any]:
    """The variant and what was lost together, from plain data."""
    variant = ", ".join(map(canonical_name, values["variant"].split(", ")))
    return {"variant": variant, "together": Lost.from_dict(values["together"])}


def _by_number(values: dict[Any, Any]) -> dict[int, Lost]:
    return {int(number): Lost.from_dict(lost) for number, lost in values.items()}


def _shares(costs: dict[Any, float]) -> dict[Any, float]:
    """Each as a share of the total; as it is, if nothing costs anything."""
    total = sum(costs.values())
    return {unit: cost / total if total > 0 else cost for unit, cost in costs.items()}


def _recall_lost(lost: Lost) -> float:
    """The nats of recall that were lost; 0 if recall was not measured."""
    return 0.0 if lost.recall is None or lost.stock_recall is None else lost.stock_recall - lost.recall


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
    return Sensitivity(
        variant=_names(chosen), together=together, layers={number: lost for (number, _), lost in alone.items()}
    )


def head_sensitivity(
    model: nn.Module, batches: Iterable[Any] | HeldOut, *, layers: Iterable[int] | None = None, progress: bool = True
) -> HeadSensitivity:
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
    heads: dict[int, dict[int, Lost]] = {layer.number: {} for layer in chosen}
    for (number, head), lost in alone.items():
        heads[number][head] = lost
    return HeadSensitivity(variant=_names(chosen), together=together, heads=heads)


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
) -> tuple[dict[tuple[int, Any], Lost], Lost]:
    """What is lost while one unit runs the variant, by the layer's number and the head; and while all layers run it.

    Args:
        model: the patched model.
        installation: its swaps.
        layers: all layers that are measured.
        units: each a layer, and a key/value head of it or None for the whole layer.
        held: the rows.
        progress: show a progress bar.
    """
    alone: dict[tuple[int, Any], Lost] = {}
    swapped = installation.layers()
    with installation.strengths_kept():
        for layer, head in bar(units, desc="sensitivity", shown=progress):
            installation.set_strength(dict.fromkeys(swapped, 0.0) | {layer: 1.0})
            with contextlib.nullcontext() if head is None else _one_head(layer, head):
                alone[layer.number, head] = held.lost(model)
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


def by_heads(classes: Iterable[type[Variant]]) -> str:
    """The name of the variant among these that can leave heads as they are.

    Raises:
        ValueError: none can.
    """
    classes = tuple(classes)
    for cls in classes:
        if OPTION in {field.name for field in dataclasses.fields(cls.Options)}:
            return cls.name
    names = "+".join(cls.name for cls in classes)
    raise ValueError(f"{names} changes all heads of a layer; heads are chosen for a variant with {OPTION}: window.")


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
        swap.set_options({**swap.options, name: {**swap.options[name], OPTION: heads}})


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
