"""The record of one run, `results.json` with `"version": 1`. Recipes write it; cards, plots and tables read it.

The file may come from a stranger, so it is read strictly: a field that is missing, unknown or of another type is an
error that names the field, and so is a number that is not finite.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import types
import typing
from collections.abc import Hashable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from importlib import import_module
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # public, but not in its __all__

from ..layer.calibration import FITS
from ..layer.registry import canonical_keys, canonical_name, parse
from ..variants.softmax import Softmax

VERSION = 1
RESULTS_FILE = "results.json"
REPORTED_VERSIONS = ("hf_attn_swap", "torch", "transformers")
STEPS = (*FITS, "transfer", "distil", "schedule", "fine_tune")  # of a conversion
RELATIONS = ("adapter", "finetune", "merge", "quantized")  # the relations to a base model that the Hub knows
SCRATCH = "scratch"
IDENTIFIER = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")  # of licences and tasks on the Hub
LOADER = re.compile(r"[^\W\d]\w*\.[^\W\d]\w*|[^\W\d]\w*For\w*|AutoModel")  # a class of a recipe, or of transformers
BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # no line of text has these
R = TypeVar("R", bound="Record")


@dataclass(frozen=True, kw_only=True)
class Record:
    """The base class of all records: a field has the type of its annotation, or is refused.

    Raises:
        ValueError: a field has a wrong value; the message names the field, the value, and what the value must be.
    """

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in fields(self):
            object.__setattr__(self, field.name, checked(getattr(self, field.name), hints[field.name], field.name))

    def check(self, holds: bool, field: str, wanted: str) -> None:
        """Refuse a field whose value has the right type but breaks a rule, which `wanted` says in words."""
        if not holds:
            raise ValueError(f"{field} must be {wanted}, got {getattr(self, field)!r}.")


def checked(value: Any, hint: Any, where: str) -> Any:
    """A value of a record or of JSON as its annotation has it; numpy's numbers become Python's.

    Raises:
        ValueError: the value has another type, is a number that is not finite, or is no line of text.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in inner:
            return None
        choices = [choice for choice in inner if choice is not type(None)]
        same = [choice for choice in choices if (typing.get_origin(choice) or choice) is type(value)]
        return checked(value, (same or choices)[0], where)
    if origin in (tuple, list) and isinstance(value, (list, tuple)):
        return origin(checked(item, inner[0], f"{where}[{index}]") for index, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {checked(key, str, where): checked(item, inner[1], f"{where}.{key}") for key, item in value.items()}
    if isinstance(hint, type) and issubclass(hint, Record):
        return value if isinstance(value, hint) else read_record(hint, value, where)
    if hint is float and not isinstance(value, bool) and isinstance(value, Real):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}, and no figure: leave the seed out and say so in limits.")
        return float(value)
    if hint is int and not isinstance(value, bool) and isinstance(value, Integral):
        return int(value)
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str) and value.strip() and not BREAKS.search(value):
        return str(value)
    words = {"str": "a line of text", "tuple": "a list"}
    name = getattr(origin or hint, "__name__", str(hint))
    raise ValueError(f"{where} must be {words.get(name, name)}, got {value!r}.")


def read_record(cls: type[R], data: Any, where: str = "") -> R:
    """Build a record from plain data, as JSON gives it. `where` is the path of the data in the file.

    Raises:
        ValueError: names every field that is missing or unknown, or the first field of a wrong type.
    """
    path = f"{where}." if where else ""
    if not isinstance(data, dict):
        raise ValueError(f"{where} must be an object, got {data!r}.")
    hints = typing.get_type_hints(cls)
    missing = [path + field.name for field in fields(cls) if field.default is MISSING and field.name not in data]
    unknown = [path + str(name) for name in data if name not in {field.name for field in fields(cls)}]
    if missing or unknown:
        raise ValueError(f"missing fields: {', '.join(missing) or 'none'}; unknown fields: {', '.join(unknown)}.")
    values = {name: checked(value, hints[name], path + name) for name, value in data.items()}
    try:
        return cls(**values)
    except ValueError as problem:
        raise ValueError(f"{path}{problem}") from None


@dataclass(frozen=True, kw_only=True)
class BaseModel(Record):
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
        super().__post_init__()
        _check_repo_id(self.name, "name")
        self.check(self.relation in (*RELATIONS, SCRATCH), "relation", f"one of {', '.join((*RELATIONS, SCRATCH))}")
        self.check(LOADER.fullmatch(self.auto_class) is not None, "auto_class", "a model class, or recipe.Class")


@dataclass(frozen=True, kw_only=True)
class Component(Record):
    """One variant of a composition: its formula and paper as the package states them, and all its options."""

    name: str
    formula: str
    paper: str
    options: dict[str, str | bool | int | float | list[int] | None]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(_harmless(self.name), "name", "without < and >")
        object.__setattr__(self, "name", canonical_name(self.name))


@dataclass(frozen=True, kw_only=True)
class AppliedSwap(Record):
    """The layers that run a variant or a composition, and its strength: 0 is the pretrained model, 1 the formula."""

    components: tuple[Component, ...]
    layers: tuple[int, ...]
    strength: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(_different([part.name for part in self.components]), "components", "one or more different variants")
        self.check(_different(self.layers) and min(self.layers) >= 0, "layers", "one or more, all different, from 0")
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
        _check_repo_id(self.name, "name")
        self.check(min(self.rows.values(), default=0) > 0, "rows", "counts above 0")
        self.check(self.evaluated in self.rows, "evaluated", "one of the splits in rows")
        for name in ("config", "revision", "rows"):
            self.check(_harmless(str(getattr(self, name))), name, "without < and >")


@dataclass(frozen=True, kw_only=True)
class Metric(Record):
    """One metric, measured once per seed. Its name is the Hub's name where there is one, such as "accuracy"."""

    name: str
    higher_is_better: bool
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(_harmless(self.name), "name", "without < and >")

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
        figures = (*self.metrics, *(self.outliers or ()))
        self.check(_different(self.seeds), "seeds", "one or more, all different")
        self.check(bool(self.metrics) and _different([f.name for f in figures]), "metrics", "of different names")
        counts = {len(figure.values) for figure in figures}
        self.check(counts == {len(self.seeds)}, "seeds", "as many as each metric has values")


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


@dataclass(frozen=True, kw_only=True)
class Cost(Record):
    """Time or memory as a ratio to stock attention: 1.2 is a fifth more. `of` says what was measured, and how."""

    ratio: float
    of: str


@dataclass(frozen=True, kw_only=True)
class Budget(Record):
    """The training of each seed: 0 steps and no learning rate if nothing was trained."""

    steps: int
    batch_size: int
    sequence_length: int
    learning_rate: float | None
    optimizer: str | None


@dataclass(frozen=True, kw_only=True)
class RunResult(Record):
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
        steps: the conversion's steps by name, of `STEPS`, in their order; empty where the model was only patched (and
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
        super().__post_init__()
        _check_repo_id(self.name, "name")
        self.check("/" not in self.name, "name", "a name without an owner")
        self.check(self.name.startswith(f"{self.study or self.name}"), "study", f"the beginning of {self.name}")
        layers = [layer for swap in self.swaps for layer in swap.layers]
        self.check(_different(layers) and max(layers) < self.modules, "swaps", "of different layers of the model")
        self.check(set(self.steps or ()) <= set(STEPS), "steps", f"of {', '.join(STEPS)}")
        for name, value in {"task": self.task, "license": self.license or "none"}.items():
            self.check(IDENTIFIER.fullmatch(value) is not None, name, "an identifier of the Hub")
        self.check(all(map(_harmless, self.language)), "language", "codes such as en")
        self.check(set(REPORTED_VERSIONS) <= set(self.versions), "versions", f"of {', '.join(REPORTED_VERSIONS)}")
        self.check(self.control is not None or self.difference is None, "difference", "null without a control")
        self.check(self.control is None or self.stock is None, "stock", "null beside a control")
        for name in ("control", "stock"):
            other = getattr(self, name)
            self.check(other is None or _kinds(other) == _kinds(self.converted), name, "of the metrics of converted")

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
            ValueError: a field is missing, unknown or of the wrong type, or another version wrote it.
        """
        version = data.get("version") if isinstance(data, dict) else None
        if version != VERSION:
            raise ValueError(f'results are a JSON object with "version": {VERSION}; here the version is {version!r}.')
        return read_record(cls, {key: value for key, value in data.items() if key != "version"})

    @classmethod
    def load(cls, path: str | Path) -> RunResult:
        """Read a results.json.

        Raises:
            ValueError: the content is wrong; the message says what is wrong, and where.
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


def _check_repo_id(value: str, field: str) -> None:
    try:
        validate_repo_id(value)
    except ValueError as problem:
        raise ValueError(f"{field} must be a name on the Hub: {problem}") from None


def _harmless(name: str) -> bool:
    """True if a name of the metadata of a card is no HTML: YAML keeps it as it is."""
    return {"<", ">"}.isdisjoint(name)


def _different(things: Sequence[Hashable]) -> bool:
    return bool(things) and len(set(things)) == len(things)


def _kinds(measured: Measured) -> list[list[tuple[str, bool]]]:
    """The names and directions of the figures, which the card shows side by side."""
    sides = (measured.metrics, measured.outliers or ())
    return [[(figure.name, figure.higher_is_better) for figure in side] for side in sides]
