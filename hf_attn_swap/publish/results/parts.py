"""The parts of a run: base model, swaps, data, what was measured, cost and budget."""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from ...layer.registry import canonical_name
from .record import Record, Scalar

RELATIONS = ("adapter", "finetune", "merge", "quantized")  # the relations to a base model that the Hub knows
SCRATCH = "scratch"


@dataclass(frozen=True, kw_only=True)
class BaseModel(Record):
    """The pretrained model that was converted, or the architecture that was trained from random weights.

    Args:
        name: name of the base model on the Hub, such as "google-bert/bert-base-uncased".
        revision: commit or tag of the base model; None means the newest at the time of the run.
        relation: how the published model relates to the base model: "finetune", "adapter", "quantized", "merge", or
            "scratch". "scratch" means that only the architecture was used, at sizes that `conversion` states.
        auto_class: the class of transformers that loads the published model, such as
            "AutoModelForSequenceClassification"; or a class of a recipe with the recipe's file, such as "lra.Matcher".
        on_hub: False if `name` is only the name of a folder; the card then has no link to it.
    """

    name: str
    revision: str | None
    relation: str
    auto_class: str
    on_hub: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_repo_id("name")
        relations = (*RELATIONS, SCRATCH)
        self.check(self.relation in relations, "relation", f"one of {', '.join(relations)}")
        module, _, name = self.auto_class.rpartition(".")
        public = not module and ("For" in name or name == "AutoModel")
        known = name.isidentifier() and (public or module.isidentifier())
        self.check(known, "auto_class", "a model class of transformers, or recipe.Class")


@dataclass(frozen=True, kw_only=True)
class Component(Record):
    """One variant of a composition: its formula and paper as the package states them, and all its options.

    A name from an older record becomes the canonical name.
    """

    name: str
    formula: str
    paper: str
    options: dict[str, Scalar | list[int]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_names("name", [self.name])
        object.__setattr__(self, "name", canonical_name(self.name))


@dataclass(frozen=True, kw_only=True)
class AppliedSwap(Record):
    """The layers that run a variant or a composition, and its strength.

    Strength 0 is the pretrained model, and strength 1 is the paper's formula.
    """

    components: tuple[Component, ...]
    layers: tuple[int, ...]
    strength: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.components), "components", "at least one")
        self.check(different([component.name for component in self.components]), "components", "different variants")
        self.check(bool(self.layers) and different(self.layers), "layers", "one or more, all different")
        self.check(min(self.layers) >= 0, "layers", "counted from 0")
        self.check(0 <= self.strength <= 1, "strength", "in [0, 1]")

    @property
    def variant(self) -> str:
        """The name as `patch_model` takes it, such as "outeffhop+gated"."""
        return "+".join(component.name for component in self.components)


@dataclass(frozen=True, kw_only=True)
class DataSet(Record):
    """The data of a run.

    Args:
        name: name on the Hub.
        config: configuration on the Hub, or None.
        revision: commit or tag, or None.
        rows: the number of rows used of each split.
        evaluated: the split that was measured.
    """

    name: str
    config: str | None
    revision: str | None
    rows: dict[str, int]
    evaluated: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_repo_id("name")
        self.check(all(count > 0 for count in self.rows.values()), "rows", "counts above 0")
        self.check_names("config, revision and rows", [self.config, self.revision, *self.rows])
        self.check(self.evaluated in self.rows, "evaluated", f"one of the splits in rows ({', '.join(self.rows)})")


@dataclass(frozen=True, kw_only=True)
class Metric(Record):
    """One metric, measured once per seed. Its name is the Hub's name where there is one, such as "accuracy"."""

    name: str
    higher_is_better: bool
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_names("name", [self.name])

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds (n - 1); None for a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Measured(Record):
    """One model, trained and measured once per seed.

    Args:
        seeds: the seed of each repetition.
        metrics: the metrics, each with one value per seed in the order of `seeds`; the first metric is the headline.
        outliers: likewise, metrics of the activations such as "kurtosis" and "max_inf_norm"; None if not measured.
        wall_seconds: seconds of training and measuring, all seeds together.
    """

    seeds: tuple[int, ...]
    metrics: tuple[Metric, ...]
    outliers: tuple[Metric, ...] | None
    wall_seconds: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(bool(self.seeds) and different(self.seeds), "seeds", "one or more, all different")
        self.check(bool(self.metrics), "metrics", "at least one")
        self.check(self.outliers is None or bool(self.outliers), "outliers", "at least one, or null")
        self.check(self.wall_seconds >= 0, "wall_seconds", "at least 0")
        figures = (*self.metrics, *(self.outliers or ()))
        for figure in figures:
            if len(figure.values) != len(self.seeds):
                raise ValueError(
                    f"{figure.name} has {len(figure.values)} values for {len(self.seeds)} seeds; give one per seed."
                )
        self.check(different([figure.name for figure in figures]), "metrics", "and outliers, all of different names")


@dataclass(frozen=True, kw_only=True)
class Interval(Record):
    """The headline metric's difference to the control: converted minus control, with its 95 % interval.

    Args:
        mean: mean difference over the seeds.
        low: lower end of the interval.
        high: upper end of the interval.
        of: how the interval was computed.
    """

    mean: float
    low: float
    high: float
    of: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.low <= self.high, "high", "at least low")


@dataclass(frozen=True, kw_only=True)
class Cost(Record):
    """Time or memory as a ratio to stock attention: 1.2 is a fifth more. `of` says what was measured, and how."""

    ratio: float
    of: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.ratio > 0, "ratio", "above 0")


@dataclass(frozen=True, kw_only=True)
class Budget(Record):
    """The training of each seed: 0 steps and no learning rate if nothing was trained."""

    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float | None
    optimizer: str | None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(self.steps >= 0, "steps", "at least 0")
        self.check(self.batch_size > 0, "batch_size", "above 0")
        self.check(self.sequence_length > 0, "sequence_length", "above 0")


def different(things: Sequence[Hashable]) -> bool:
    """True if no two of the things are equal."""
    return len(set(things)) == len(things)
