"""Measures what each layer, or each key/value head, alone costs: it runs the variant, and all others run none.

Layers whose swap costs little are good candidates for a conversion; the costliest layers are best kept as they are.
Where a variant hides keys of a causal language model, recall counts as much as KL: perplexity hardly shows its loss.
The method is this package's own, after the published hybrids that keep a part of the softmax layers;
docs/mathematics.md, section Which layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torch import nn

from ..layer.registry import canonical_name
from ..measuring.held_out import HeldOut
from ..measuring.lost import Lost
from ..patch import need_installation
from ..text.bar import bar
from ..text.table import Table
from ..wiring.install import Installation
from ..wiring.layers import Layer
from .full_heads import with_full_heads
from .passages import least, passages_beyond

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (7.0, 3.2)  # of the picture, in inches
COLOUR = "#4c72b0"
K = TypeVar("K")


@dataclass(frozen=True, kw_only=True)
class _Costs:
    """What each part of a model alone costs: a layer, or a key/value head.

    Attributes:
        variant: the name of the variant.
        together: what was lost with all these parts swapped.
    """

    variant: str
    together: Lost
    part: ClassVar[str]

    @property
    def alone(self) -> dict[Any, Lost]:
        """What was lost with this part alone swapped, by the part."""
        raise NotImplementedError

    @property
    def order(self) -> tuple[Any, ...]:
        """The parts, from the cheapest to the costliest.

        By KL or the relative error; if recall was measured, by the sum of both, each as a share of its total over the
        parts. A part without which the model recalls more costs no recall.
        """
        costs = _shares({part: lost.divergence_or_error for part, lost in self.alone.items()})
        recalls = _shares({part: max(0.0, _recall_lost(lost)) for part, lost in self.alone.items()})
        return tuple(sorted(self.alone, key=lambda part: (costs[part] + recalls[part], part)))

    def table(self) -> Table:
        """A row per part, from the cheapest."""
        recalled = self.together.recall is not None
        named = [*((self.name_of(part), self.alone[part]) for part in self.order), ("all", self.together)]
        return Table(
            summary=f"{self.variant}: what each {self.part} alone costs, from the cheapest.",
            header=(self.part, self.together.measure, *(["recall lost, nats"] if recalled else [])),
            rows=[
                (name, f"{lost.degradation:.3g}", *([f"{_recall_lost(lost):.3g}"] if recalled else []))
                for name, lost in named
            ],
        )

    def name_of(self, part: Any) -> str:
        """A part in the table."""
        return str(part)

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
    part: ClassVar[str] = "layer"

    @property
    def alone(self) -> dict[int, Lost]:
        """What was lost with this layer alone swapped, by the layer's number."""
        return self.layers

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sensitivity:
        """The figures from their plain data, also after JSON."""
        return cls(**_known(values), layers=_by_number(values["layers"]))

    def plot(self) -> Figure:
        """A bar per layer, in the order of the model."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        indices = sorted(self.layers)
        shares = [self.layers[index].degradation for index in indices]
        axes.bar([str(index) for index in indices], shares, color=COLOUR)
        axes.set(xlabel="layer", ylabel=self.together.measure, title=f"{self.variant}: what each layer alone costs")
        return figure


@dataclass(frozen=True, kw_only=True)
class HeadSensitivity(_Costs):
    """What each key/value head alone costs.

    Attributes:
        variant: the name of the variant.
        together: what was lost with all these heads swapped.
        heads: what was lost with this head alone swapped, by the layer's number and the number of the head in it.
    """

    heads: dict[int, dict[int, Lost]]
    part: ClassVar[str] = "key/value head"

    @property
    def alone(self) -> dict[tuple[int, int], Lost]:
        """What was lost with this head alone swapped, by (layer, head)."""
        return {(layer, head): lost for layer, heads in self.heads.items() for head, lost in heads.items()}

    def name_of(self, part: Any) -> str:
        """The numbers of the layer and of the head, such as 18.2."""
        return "{}.{}".format(*part)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadSensitivity:
        """The figures from their plain data, also after JSON."""
        heads = {int(layer): _by_number(heads) for layer, heads in values["heads"].items()}
        return cls(**_known(values), heads=heads)

    def plot(self) -> Figure:
        """A bar per head, in the order of the model; a colour per head of a layer."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        for head in sorted({head for heads in self.heads.values() for head in heads}):
            shown = {layer: heads[head].degradation for layer, heads in sorted(self.heads.items()) if head in heads}
            width = 0.9 / max(map(len, self.heads.values()))
            axes.bar([layer + head * width for layer in shown], list(shown.values()), width, label=f"head {head}")
        axes.set(xlabel="layer", ylabel=self.together.measure, title=f"{self.variant}: what each head alone costs")
        axes.legend(ncols=4, fontsize="small")
        return figure


def _known(values: dict[str, Any]) -> dict[str, Any]:
    """The variant and what was lost together, from plain data."""
    variant = ", ".join(map(canonical_name, values["variant"].split(", ")))
    return {"variant": variant, "together": Lost.from_dict(values["together"])}


def _by_number(values: dict[Any, Any]) -> dict[int, Lost]:
    return {int(number): Lost.from_dict(lost) for number, lost in values.items()}


def _shares(costs: dict[Any, float]) -> dict[Any, float]:
    """Each as a share of the total; as it is, if nothing costs anything."""
    total = sum(costs.values())
    return {part: cost / total if total > 0 else cost for part, cost in costs.items()}


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
    held = batches if isinstance(batches, HeldOut) else _held_out(model, batches, progress=progress)

    @contextlib.contextmanager
    def running(layer: Layer) -> Iterator[None]:
        installation.set_strength({layer: 1.0})
        yield
        installation.set_strength({layer: 0.0})

    alone = {layer: partial(running, layer) for layer in chosen}
    found, together = _each_alone(model, chosen, alone, held, "layer", progress)
    return Sensitivity(
        variant=_names(chosen), layers={layer.number: lost for layer, lost in found.items()}, together=together
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
    held = batches if isinstance(batches, HeldOut) else _held_out(model, batches, progress=progress)

    def running(layer: Layer, head: int) -> contextlib.AbstractContextManager[None]:
        others = [other for other in range(layer.swap.geometry.kv_heads) if other != head]
        return installation.temporarily({layer: with_full_heads(layer, others)})

    alone = {
        (layer, head): partial(running, layer, head) for layer in chosen for head in range(layer.swap.geometry.kv_heads)
    }
    found, together = _each_alone(model, chosen, alone, held, "head", progress)
    heads: dict[int, dict[int, Lost]] = {}
    for (layer, head), lost in found.items():
        heads.setdefault(layer.number, {})[head] = lost
    return HeadSensitivity(variant=_names(chosen), heads=heads, together=together)


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


def _each_alone(
    model: nn.Module,
    layers: Sequence[Layer],
    alone: Mapping[K, Callable[[], contextlib.AbstractContextManager[None]]],
    held: HeldOut,
    unit: str,
    progress: bool,
) -> tuple[dict[K, Lost], Lost]:
    """What is lost while one part runs, by the part; and what is lost while these layers run.

    Args:
        model: the patched model.
        layers: the layers.
        alone: by the part, what lets this part run in a model that runs nothing else.
        held: the rows.
        unit: what a part is called.
        progress: show a progress bar.
    """
    found: dict[K, Lost] = {}
    installation = need_installation(model)
    with installation.strengths_kept():
        installation.set_strength(dict.fromkeys(installation.layers(), 0.0))
        for part in bar(list(alone), desc="sensitivity", unit=unit, shown=progress):
            with alone[part]():
                found[part] = held.lost(model)
        installation.set_strength(dict.fromkeys(layers, 1.0))
        return found, held.lost(model)


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
