"""Measures what each layer alone costs: strength 1 in this layer, and 0 in all others.

Layers whose swap costs little are good candidates for a conversion; the costliest layers are best kept as they are.
Where a variant hides keys of a causal language model, recall counts as much as KL: perplexity hardly shows its loss.
The method is this package's own, after the published hybrids that keep a part of the softmax layers;
docs/mathematics.md, section Which layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..layer.registry import canonical_name
from ..measuring.held_out import HeldOut
from ..measuring.lost import Lost
from ..patch import need_installation, set_strength
from ..text.bar import bar
from ..text.table import Table
from .passages import least, passages_beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (7.0, 3.2)  # of the picture, in inches
COLOUR = "#4c72b0"


@dataclass(frozen=True, kw_only=True)
class Sensitivity:
    """What each layer alone costs.

    Attributes:
        variant: the name of the variant.
        layers: what was lost with this layer alone swapped, by the layer's number.
        together: what was lost with all these layers swapped.
    """

    variant: str
    layers: dict[int, Lost]
    together: Lost

    @property
    def order(self) -> tuple[int, ...]:
        """The layers, from the cheapest to the costliest.

        By KL or the relative error; if recall was measured, by the sum of both, each as a share of its total over the
        layers. A layer without which the model recalls more costs no recall.
        """
        costs = _shares({index: lost.cost for index, lost in self.layers.items()})
        recalls = _shares({index: max(0.0, _recall_lost(lost)) for index, lost in self.layers.items()})
        return tuple(sorted(self.layers, key=lambda index: (costs[index] + recalls[index], index)))

    def table(self) -> Table:
        """A row per layer, from the cheapest."""
        recalled = self.together.recall is not None
        named = [*((str(index), self.layers[index]) for index in self.order), ("all", self.together)]
        return Table(
            summary=f"{self.variant}: what each layer alone costs, from the cheapest.",
            header=("layer", self.together.measure, *(["recall lost, nats"] if recalled else [])),
            rows=[
                (name, f"{lost.share:.3g}", *([f"{_recall_lost(lost):.3g}"] if recalled else []))
                for name, lost in named
            ],
        )

    def __str__(self) -> str:
        return self.table().text()

    def _repr_html_(self) -> str:
        return self.table().html()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sensitivity:
        """The figures from their plain data, also after JSON."""
        layers = {int(index): Lost.from_dict(lost) for index, lost in values["layers"].items()}
        variant = ", ".join(map(canonical_name, values["variant"].split(", ")))
        return cls(variant=variant, layers=layers, together=Lost.from_dict(values["together"]))

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)

    def plot(self) -> Figure:
        """A bar per layer, in the order of the model."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        indices = sorted(self.layers)
        shares = [self.layers[index].share for index in indices]
        axes.bar([str(index) for index in indices], shares, color=COLOUR)
        axes.set(xlabel="layer", ylabel=self.together.measure, title=f"{self.variant}: what each layer alone costs")
        return figure


def _shares(costs: dict[int, float]) -> dict[int, float]:
    """Each as a share of the total; as it is, if nothing costs anything."""
    total = sum(costs.values())
    return {index: cost / total if total > 0 else cost for index, cost in costs.items()}


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
        ValueError: the model is not patched, has merged layers or was trained by a conversion; a layer is not swapped;
            or there is no batch.
    """
    installation = need_installation(model)
    swapped = {layer.number: layer for layer in installation.layers()}
    chosen = sorted(swapped if layers is None else layers)
    if missing := [index for index in chosen if index not in swapped]:
        raise ValueError(f"layers {missing} are not swapped; swapped are {sorted(swapped)}.")
    installation.refuse_merged("set to a strength below 1")
    if any(layer.swap.retrained for layer in swapped.values()):
        raise ValueError("a conversion trained weights of this model; measure the layers before the distillation.")
    held = batches if isinstance(batches, HeldOut) else _held_out(model, batches, progress=progress)
    found: dict[int, Lost] = {}
    with installation.strengths_kept():
        set_strength(model, 0.0)
        for index in bar(chosen, desc="sensitivity", unit="layer", shown=progress):
            set_strength(model, 1.0, layers=[index])
            found[index] = held.lost(model)
            set_strength(model, 0.0, layers=[index])
        set_strength(model, 1.0, layers=chosen)
        together = held.lost(model)
    names = {"+".join(swapped[index].swap.names) for index in chosen}
    return Sensitivity(variant=", ".join(sorted(names)), layers=found, together=together)


def _held_out(model: nn.Module, batches: Iterable[Any], *, progress: bool) -> HeldOut:
    """The rows, with passages where the variants of the model hide keys and there is room for passages."""
    given: list[Any] = [batches] if isinstance(batches, Mapping) else list(batches)
    swaps = [layer.swap for layer in need_installation(model).layers()]
    reach = least(variant.reach(variant.options) for swap in swaps for variant in swap.variants)
    passages = None
    if reach is not None:
        with contextlib.suppress(ValueError):
            passages = passages_beyond(model, given, reach)
    return HeldOut(model, given, passages=passages, progress=progress)
