"""What a conversion did and what it cost, step by step: as text, as HTML, and as plain data."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..measuring.lost import Lost
from ..text.finite import finite
from ..text.table import Table, Tabled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (7.0, 3.2)  # of a picture, in inches
MOST_NAMES = 32  # below the bars of a picture
LARGE = 10  # from this ratio of perplexities on, a factor is easier to read than per cent
MUCH = 0.05  # without a budget, the report says from this loss on how to lose less
UNDONE = "distillation taken back"  # the name of the step
HEADER = ("step", "layers", "lost", "KL", "same first choice", "tokens", "minutes")


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Tabled):
    """What each layer, or each key/value head, alone costs.

    Attributes:
        variant: the name of the variant.
        together: what was lost with all of them swapped.
        alone: what was lost with one layer or head alone swapped, by the layer's number, or by "layer.head".
    """

    variant: str
    together: Lost
    alone: dict[int | str, Lost]

    @property
    def order(self) -> tuple[Any, ...]:
        """The layers or heads, from the cheapest to the costliest.

        By KL or the relative error; if recall was measured, by the sum of both, each as a share of its total over all.
        A layer or head that makes the model recall more costs no recall.
        """
        costs = _shares({unit: lost.divergence_or_error for unit, lost in self.alone.items()})
        recalls = _shares({unit: max(0.0, _recall_lost(lost)) for unit, lost in self.alone.items()})
        return tuple(sorted(costs, key=lambda unit: costs[unit] + recalls[unit]))

    def share(self, lost: Lost) -> float:
        """A loss as one number: KL (or the relative error) and lost recall, each as a share of its value in `together`.

        A model that recalls more than stock has a negative part.
        """
        parts = (
            (lost.divergence_or_error, self.together.divergence_or_error),
            *([] if lost.recall is None else [(_recall_lost(lost), _recall_lost(self.together))]),
        )
        return sum(part / whole if whole > 0 else part for part, whole in parts)

    @property
    def unit(self) -> str:
        """What is measured, in words."""
        return "key/value head" if any(isinstance(unit, str) for unit in self.alone) else "layer"

    def table(self) -> Table:
        """A row per layer or head, from the cheapest."""
        recalled = self.together.recall is not None
        named = [*((str(unit), self.alone[unit]) for unit in self.order), ("all", self.together)]
        return Table(
            summary=f"{self.variant}: what each {self.unit} alone costs, from the cheapest.",
            header=(self.unit, self.together.measure, *(["recall lost, nats"] if recalled else [])),
            rows=[
                (name, f"{lost.degradation:.3g}", *([f"{_recall_lost(lost):.3g}"] if recalled else []))
                for name, lost in named
            ],
        )

    def plot(self) -> Figure:
        """A bar per layer or head."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.subplots()
        axes.bar(range(len(self.alone)), [lost.degradation for lost in self.alone.values()], 0.9)
        if len(self.alone) <= MOST_NAMES:
            axes.set_xticks(range(len(self.alone)), list(map(str, self.alone)))
        axes.set(
            xlabel=self.unit, ylabel=self.together.measure, title=f"{self.variant}: what each {self.unit} alone costs"
        )
        return figure

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sensitivity:
        """The figures from their plain data, also after JSON."""
        alone = {
            int(unit) if str(unit).isdigit() else unit: Lost.from_dict(lost) for unit, lost in values["alone"].items()
        }
        return cls(variant=values["variant"], together=Lost.from_dict(values["together"]), alone=alone)


def _shares(costs: dict[Any, float]) -> dict[Any, float]:
    """Each as a share of the total; as it is, if nothing costs anything."""
    total = sum(costs.values())
    return {unit: cost / total if total > 0 else cost for unit, cost in costs.items()}


def _recall_lost(lost: Lost) -> float:
    """The nats of recall that were lost; 0 if recall was not measured."""
    return 0.0 if lost.recall is None or lost.stock_recall is None else lost.stock_recall - lost.recall


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step of a conversion did.

    Attributes:
        name: what was done, in a few words.
        layers: the numbers of the layers that run the variant after this step.
        lost: what the model had lost after this step, on the held-out rows.
        tokens: the tokens that this step trained on (patches of images, rows of other data; see the report's `unit`).
        seconds: the time of the step.
    """

    name: str
    layers: tuple[int, ...]
    lost: Lost
    tokens: int = 0
    seconds: float = 0.0

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StepRecord:
        """A record from its plain data."""
        return cls(**{**values, "layers": tuple(values["layers"]), "lost": Lost.from_dict(values["lost"])})

    def cells(self, *, recall: bool = False) -> tuple[str, ...]:
        """The row of the table, in the order of `HEADER`, and then recall if it is asked for."""
        lost = self.lost
        recalled = "-" if lost.recall is None else f"{lost.recall:.2f} of {lost.stock_recall:.2f}"
        return (
            self.name,
            str(len(self.layers)),
            in_words(lost),
            "-" if lost.divergence is None else f"{lost.divergence:.3g}",
            "-" if lost.agreement is None else f"{lost.agreement:.1%}",
            f"{self.tokens:,}" if self.tokens else "-",
            f"{self.seconds / 60:.1f}",
            *([recalled] if recall else []),
        )


def in_words(lost: Lost) -> str:
    """A loss as per cent, or as a factor if it is large."""
    return f"{lost.degradation:.2%}" if lost.ratio is None or lost.ratio < LARGE else f"x {lost.ratio:,.0f}"


@dataclass(frozen=True, kw_only=True)
class ConversionReport:
    """The record of a conversion.

    Attributes:
        model: the class of the model.
        variant: the name of the variant.
        steps: what was done, in order. The last step describes the model as it is now.
        said: what steps say of what they did, a sentence each.
        kept: why a layer kept its own attention, by the layer's number.
        max_loss: the budget, as a share; None without a budget.
        min_recall: the budget for recall, as a share of the stock model's; None without one.
        sensitivity: what each layer alone costs; None if no layers had to be chosen.
        head_sensitivity: what each key/value head alone costs; None if no heads had to be chosen.
        unit: what the tokens of a step count: "tokens", "patches" or "rows".
        held_out: the number of held-out rows that the loss was measured on.
        row_length: the mean number of tokens, or of patches, of a training row; 0 for other data.
        train_rows: the number of training rows.
        rows_per_step: the number of rows of a training step, of all processes together.
        learning_rate: the highest learning rate.
        trained: True if a training is in the weights, and was not taken back.
    """

    model: str
    variant: str
    steps: tuple[StepRecord, ...]
    said: tuple[str, ...]
    kept: dict[int, str]
    max_loss: float | None
    min_recall: float | None
    sensitivity: Sensitivity | None
    unit: str
    held_out: int
    row_length: float
    train_rows: int
    rows_per_step: int
    learning_rate: float
    trained: bool
    head_sensitivity: Sensitivity | None = None

    @property
    def lost(self) -> Lost:
        """What the model has lost now."""
        return self.steps[-1].lost

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the converted layers."""
        return self.steps[-1].layers

    @property
    def training_steps(self) -> int:
        """The number of training steps."""
        return round(sum(step.tokens for step in self.steps) / ((self.row_length or 1) * self.rows_per_step))

    @property
    def met(self) -> bool:
        """True if something was converted and the loss is within the budget. Without a budget, any loss is."""
        return bool(self.layers) and self.lost.within(self.max_loss, self.min_recall)

    @property
    def budget(self) -> str:
        """The budget in words; empty without one."""
        words = [] if self.max_loss is None else [f"{self.max_loss:.2%}"]
        return " and ".join(words + ([] if self.min_recall is None else [f"{self.min_recall:.0%} of recall"]))

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        count = len(self.layers) + len(self.kept)
        if not self.layers and self.budget:
            return (
                f"{self.model}: no layer could run {self.variant} within the budget of {self.budget} "
                f"({self.lost.measure}); the model is as it was."
            )
        words = (
            f"{self.model}: {len(self.layers)} of {count} layers run {self.variant}; {self.lost.measure}: "
            f"{in_words(self.lost)}, on {self.held_out} held-out rows"
        )
        if any(step.name == UNDONE for step in self.steps):
            words += "; training hurt and was taken back: take a smaller learning rate, or more texts"
        if not self.budget:
            return f"{words}."
        return f"{words} ({'within' if self.met else 'NOT within'} the budget of {self.budget})."

    def table(self) -> Table:
        """A row per step."""
        header = [self.unit if name == "tokens" else name for name in HEADER]
        distance = self.lost.recall_distance
        if distance is not None:
            header.append(f"recall after {distance}")
        rows = [step.cells(recall=distance is not None) for step in self.steps]
        return Table(summary=self.summary, header=header, rows=rows)

    def reasons(self) -> list[str]:
        """Why layers kept their own attention: a sentence per reason."""
        lines = []
        for reason in dict.fromkeys(self.kept.values()):
            numbers = [str(index) for index in sorted(self.kept) if self.kept[index] == reason]
            whose = f"Layer {numbers[0]} kept its" if len(numbers) == 1 else f"Layers {', '.join(numbers)} kept their"
            lines.append(f"{whose} own attention: {reason}.")
        return lines

    def advice(self) -> list[str]:
        """How to lose less: a sentence if the budget was missed, or if much was lost without a budget."""
        if self.met and (self.budget or self.lost.degradation < MUCH):
            return []
        if self.budget:
            looser = "a larger max_loss" if self.min_recall is None else "a looser budget"
            return [f"To convert more layers, or to lose less, allow more tokens or {looser}."]
        return [
            "To lose less, allow more tokens, bring data like those that the model will read, or convert fewer layers: "
            "keep=0.5 (in a shell --keep 0.5) keeps the costliest half of the layers as they are, and max_loss=0.05 "
            "(--max-loss 5%) converts as many layers as a loss of 5 % allows."
        ]

    def notes(self) -> list[str]:
        """The sentences below the table."""
        return [*self.said, *self.reasons(), *self.advice()]

    def __str__(self) -> str:
        return "\n".join([self.table().text(), *self.notes()])

    def _repr_html_(self) -> str:
        return self.table().html() + "".join(f"<p>{escape(line)}</p>" for line in self.notes())

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            **asdict(self),
            "layers": list(self.layers),
            "met": self.met,
            "measure": self.lost.measure,
            "loss": self.lost.degradation,
        }

    def save(self, folder: Path) -> Path:
        """Write conversion.json and conversion.html, and return the path of the page."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(finite(self.to_dict()), indent=1, allow_nan=False)
        (folder / "conversion.json").write_text(f"{text}\n", encoding="utf-8")
        page = folder / "conversion.html"
        title = f"{self.model} with {self.variant}"
        costs = "".join(costs._repr_html_() for costs in (self.head_sensitivity, self.sensitivity) if costs is not None)
        page.write_text(
            f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>"
            "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
            "table{border-collapse:collapse}td,th{padding:.2rem .8rem;border-bottom:1px solid #8886;text-align:left}"
            f":root{{color-scheme:light dark}}</style><h1>{escape(title)}</h1>{self._repr_html_()}{costs}</html>\n",
            encoding="utf-8",
        )
        return page
