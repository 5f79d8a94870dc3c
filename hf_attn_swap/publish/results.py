"""The record of one run, `results.json` with `"version": 1`. Recipes write it; cards, plots and tables read it."""

from __future__ import annotations

import json
import platform
import statistics
import types
import typing
from dataclasses import asdict, dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but not in its __all__
from transformers import TrainingArguments

from ..layer.registry import canonical_keys, canonical_name, parse
from ..variants.softmax import Softmax

VERSION = 1
RESULTS_FILE = "results.json"
REPORTED_VERSIONS = ("hf_attn_swap", "torch", "transformers")
RELATIONS = ("adapter", "finetune", "merge", "quantized")  # the relations to a base model that the Hub knows
SCRATCH = "scratch"


def read(hint: Any, value: Any) -> Any:
    """A value of JSON as an annotation has it: dataclasses in place of objects, and tuples in place of lists.

    Raises:
        KeyError, TypeError, AttributeError: a field of a dataclass is missing or unknown.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):  # a type or None
        return None if value is None else read(inner[0], value)
    if origin is tuple:
        return tuple(read(inner[0], item) for item in value)
    if is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        record: Any = hint
        return record(**{name: read(hints[name], item) for name, item in value.items()})
    return value


@dataclass(frozen=True, kw_only=True)
class BaseModel:
    """The pretrained model that was converted, or the architecture that was trained from random weights.

    Args:
        name: name of the base model on the Hub, such as "google-bert/bert-base-uncased".
        revision: commit or tag of the base model; None means the newest at the time of the run.
        relation: how the published model relates to the base model: one of `RELATIONS`, or "scratch": only the
            architecture was used, at sizes that `conversion` states.
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
        validate_repo_id(self.name)
        if self.relation not in (*RELATIONS, SCRATCH):
            raise ValueError(f"relation must be one of {', '.join((*RELATIONS, SCRATCH))}, got {self.relation!r}.")


@dataclass(frozen=True, kw_only=True)
class Component:
    """One variant of a composition: its formula and paper as the package states them, and all its options."""

    name: str
    formula: str
    paper: str
    options: dict[str, str | bool | int | float | list[int] | None]

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", canonical_name(self.name))


@dataclass(frozen=True, kw_only=True)
class AppliedSwap:
    """The layers that run a variant or a composition, and its strength: 0 is the pretrained model, 1 the formula."""

    components: tuple[Component, ...]
    layers: tuple[int, ...]
    strength: float

    @property
    def variant(self) -> str:
        """The name as `patch_model` takes it, such as "outeffhop+gated"."""
        return "+".join(component.name for component in self.components)


@dataclass(frozen=True, kw_only=True)
class DataSet:
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
        validate_repo_id(self.name)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric, measured once per seed. Its name is the Hub's name where there is one, such as "accuracy"."""

    name: str
    higher_is_better: bool
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over the seeds (n - 1); None for a single seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True, kw_only=True)
class Measured:
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
        if not self.metrics or any(len(metric.values) != len(self.seeds) for metric in self.metrics):
            raise ValueError("metrics must be one or more, each with a value for each seed.")


@dataclass(frozen=True, kw_only=True)
class Interval:
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


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Time or memory as a ratio to stock attention: 1.2 is a fifth more. `of` says what was measured, and how."""

    ratio: float
    of: str


@dataclass(frozen=True, kw_only=True)
class Budget:
    """The training of each seed: 0 steps and no learning rate if nothing was trained."""

    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float | None
    optimizer: str | None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run.

    Args:
        name: short name, also of its folder.
        study: what the runs on one model and one data set share of their names: "minilm-ag-news" of
            "minilm-ag-news-belief"; None if not recorded.
        base: the pretrained model.
        modules: the number of self-attention layers of the model, swapped or not.
        swaps: which layers run which variant; `read_swaps` reads this from a config.
        parameters_added: the number of parameters that the swaps added.
        conversion: how the model was converted, step by step, one sentence each.
        steps: the conversion's steps by name, in their order; empty where the model was only patched (and
            trained), None if not recorded.
        task: pipeline tag of the Hub, such as "text-classification".
        data: the data that the model was trained and measured on.
        converted: the metrics of the converted model.
        control: the metrics of the softmax model that was trained the same way; None if there is no control.
        stock: the metrics of the base model as it is, where no control was trained; None if not recorded.
        difference: the difference of the headline metric to the control, paired row by row; None if not measured.
        cost: time or memory against stock attention; None if not measured.
        budget: the training of each seed, the same for the converted model and the control.
        versions: versions of packages, by import name; at least `REPORTED_VERSIONS`.
        hardware: the machine that the run used.
        wall_seconds: seconds of the whole run, from the pretrained model to this file.
        intended_use: what the model is for.
        limits: what the model is not for, and what the metrics do not show, one sentence each.
        license: the Hub's identifier, such as "apache-2.0"; None if it is not known, and the card then names none.
        language: ISO 639 codes; empty where there is no text.
    """

    name: str
    study: str | None = None
    base: BaseModel
    modules: int
    swaps: tuple[AppliedSwap, ...]
    parameters_added: int
    conversion: tuple[str, ...]
    steps: tuple[str, ...] | None = None
    task: str
    data: DataSet
    converted: Measured
    control: Measured | None
    stock: Measured | None = None
    difference: Interval | None
    cost: Cost | None
    budget: Budget
    versions: dict[str, str]
    hardware: str
    wall_seconds: float
    intended_use: str
    limits: tuple[str, ...]
    license: str | None = None
    language: tuple[str, ...]

    def __post_init__(self) -> None:
        validate_repo_id(self.name)
        layers = [layer for swap in self.swaps for layer in swap.layers]
        if not layers or len(set(layers)) < len(layers) or max(layers) >= self.modules:
            raise ValueError(f"swaps must be of different layers of the {self.modules}, got {layers}.")
        for other in (self.control, self.stock):
            if other is not None and _kinds(other) != _kinds(self.converted):
                raise ValueError("the converted model and the model beside it must have the same metrics.")

    @property
    def variant(self) -> str:
        """The variant in one line; the variants of a hybrid model are separated by commas."""
        return ", ".join(dict.fromkeys(swap.variant for swap in self.swaps))

    @property
    def swapped(self) -> bool:
        """False for a model that was only quantized, and keeps its own softmax attention."""
        return self.base.relation != "quantized" or self.variant != Softmax.name

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `study`, `steps`, `stock` and `license` are left out where they are not recorded."""
        unrecorded = [name for name in ("study", "steps", "stock", "license") if getattr(self, name) is None]
        data = {"version": VERSION, **{name: value for name, value in asdict(self).items() if name not in unrecorded}}
        if self.base.on_hub:
            del data["base"]["on_hub"]
        return data

    def to_json(self) -> str:
        """The text of a results.json."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Any) -> RunResult:
        """Read the JSON form.

        Raises:
            ValueError: a field is missing, unknown or impossible, or another version wrote it.
        """
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise ValueError(f'results are a JSON object with "version": {VERSION}; here the version is {version!r}.')
        try:
            run: RunResult = read(cls, {name: value for name, value in data.items() if name != "version"})
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"this is no record of a run: {problem}") from problem
        return run

    @classmethod
    def load(cls, path: str | Path) -> RunResult:
        """Read a results.json.

        Raises:
            ValueError: the content is wrong; the message says where.
            OSError: the file cannot be read.
        """
        try:
            return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except ValueError as problem:  # JSON's and UTF-8's errors are ValueErrors too
            raise ValueError(f"{path}: {problem}") from None

    def save(self, path: str | Path) -> None:
        """Write a results.json."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def read_swaps(block: dict[str, Any]) -> tuple[int, tuple[AppliedSwap, ...]]:
    """The fields `modules` and `swaps` of a `RunResult`, read from a valid `attn_swap` block of a config."""
    layers: dict[str, list[int]] = {}  # entries may differ in what a conversion noted, such as the order of heads
    swaps: dict[str, AppliedSwap] = {}
    for entry in block["swaps"]:
        options = canonical_keys(entry["options"])
        components = tuple(
            Component(name=cls.name, formula=cls.about.formula, paper=cls.about.paper, options=options[cls.name])
            for cls in parse(entry["variant"])
        )
        same = repr((components, entry["strength"]))
        layers.setdefault(same, []).extend(entry["layers"])
        swaps[same] = AppliedSwap(components=components, layers=tuple(sorted(layers[same])), strength=entry["strength"])
    return block["modules"], tuple(swaps.values())


def versions() -> dict[str, str]:
    """The installed versions of `REPORTED_VERSIONS`, without local parts such as "+cpu"."""
    return {name: str(import_module(name).__version__).partition("+")[0] for name in REPORTED_VERSIONS}


def hardware(args: TrainingArguments) -> str:
    """The number and name of the devices, as text."""
    device = args.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"
    return f"{args.world_size} x {name}, {torch.get_num_threads()} threads each"


def _kinds(measured: Measured) -> list[list[tuple[str, bool]]]:
    """The names and directions of the figures, which the card shows side by side."""
    sides = (measured.metrics, measured.outliers or ())
    return [[(figure.name, figure.higher_is_better) for figure in side] for side in sides]
