"""`RunResult` and its JSON form, `results.json` with `"version": 1`.

The file is read strictly. A field that is missing, unknown or of another type is an error that names the field; so is
a number that is not finite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from ...layer.calibration import FITS
from ...variants.softmax import Softmax
from .parts import AppliedSwap, BaseModel, Budget, Cost, DataSet, Interval, Measured, Metric, different
from .record import Record, read_record

VERSION = 1
RESULTS_FILE = "results.json"
REPORTED_VERSIONS = ("hf_attn_swap", "torch", "transformers")
STEPS = (*FITS, "transfer", "distil", "schedule", "fine_tune")  # of a conversion
IDENTIFIER = re.compile(r"[a-z0-9]+([.-][a-z0-9]+)*")  # of licences and tasks on the Hub
LANGUAGE = re.compile(r"[a-z]{2,3}|code|multilingual")


@dataclass(frozen=True, kw_only=True)
class RunResult(Record):
    """One run.

    Args:
        name: short name, also of its folder.
        study: what the runs on one model and one data set share of their names: "minilm-ag-news" of
            "minilm-ag-news-belief"; None if not recorded.
        base: the pretrained model.
        modules: the number of self-attention layers of the model, swapped or not.
        swaps: which layers run which variant; `applied_swaps` reads this from a model.
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
        versions: versions of packages, by import name; at least hf_attn_swap, torch and transformers.
        hardware: the machine that the run used.
        wall_seconds: seconds of the whole run, from the pretrained model to this file.
        intended_use: what the model is for.
        limits: what the model is not for, and what the metrics do not show, one sentence each.
        license: the Hub's identifier, such as "apache-2.0"; None if it is not known.
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
    license: str | None
    language: tuple[str, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_repo_id("name")
        self.check("/" not in self.name, "name", "a name without an owner")
        if self.study is not None:
            self.check(self.name.startswith(f"{self.study}-"), "study", f"the beginning of {self.name}, before a dash")
        self.check(bool(self.swaps), "swaps", "at least one")
        layers = [layer for swap in self.swaps for layer in swap.layers]
        self.check(different(layers), "swaps", "of different layers")
        self.check(max(layers) < self.modules, "modules", f"above {max(layers)}, the last swapped layer")
        self.check(self.parameters_added >= 0, "parameters_added", "at least 0")
        self.check(bool(self.conversion), "conversion", "at least one step")
        self.check(set(self.steps or ()) <= set(STEPS), "steps", f"of {', '.join(STEPS)}")
        self.check(bool(self.limits), "limits", "at least one sentence")
        self.check(self.wall_seconds >= 0, "wall_seconds", "at least 0")
        self.check(IDENTIFIER.fullmatch(self.task) is not None, "task", 'a pipeline tag such as "text-classification"')
        known = self.license is None or IDENTIFIER.fullmatch(self.license) is not None
        self.check(known, "license", 'an identifier such as "apache-2.0"')
        self.check(all(LANGUAGE.fullmatch(code) for code in self.language), "language", 'codes such as "en"')
        self.check(set(REPORTED_VERSIONS) <= set(self.versions), "versions", f"of {', '.join(REPORTED_VERSIONS)}")
        self.check(self.control is not None or self.difference is None, "difference", "null without a control")
        self.check(self.control is None or self.stock is None, "stock", "null beside a control")
        for name, other in (("control", self.control), ("stock", self.stock)):
            if other is not None:
                _check_alike(self.converted.metrics, other.metrics, f"{name}.metrics")
                _check_alike(self.converted.outliers or (), other.outliers or (), f"{name}.outliers")

    @property
    def variant(self) -> str:
        """The variant in one line; the variants of a hybrid model are separated by commas."""
        return ", ".join(dict.fromkeys(swap.variant for swap in self.swaps))

    @property
    def swapped(self) -> bool:
        """False for a model that was only quantized, and keeps its own softmax attention."""
        return self.base.relation != "quantized" or self.variant != Softmax.name

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; `study`, `steps` and `stock` are left out where they are not recorded."""
        unrecorded = [name for name in ("study", "steps", "stock") if getattr(self, name) is None]
        found = {"version": VERSION, **{name: value for name, value in asdict(self).items() if name not in unrecorded}}
        if self.base.on_hub:
            del found["base"]["on_hub"]
        return found

    def to_json(self) -> str:
        """The text of a results.json."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_dict(cls, data: Any) -> RunResult:
        """Read the JSON form.

        Raises:
            ValueError: a field is missing, unknown or of the wrong type, or another version wrote it.
        """
        if not isinstance(data, dict) or "version" not in data:
            raise ValueError('results are a JSON object with "version": 1; this is something else.')
        if type(data["version"]) is not int or data["version"] != VERSION:
            raise ValueError(
                f"these results have version {data['version']!r}, and this hf_attn_swap reads version {VERSION}; "
                "use the hf_attn_swap that wrote them."
            )
        return read_record(cls, {key: value for key, value in data.items() if key != "version"}, "")

    @classmethod
    def load(cls, path: str | Path) -> RunResult:
        """Read a results.json.

        Raises:
            ValueError: the content is wrong; the message says what is wrong, and where.
            OSError: the file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
            return cls.from_dict(json.loads(text, object_pairs_hook=_unique))
        except ValueError as problem:  # JSON's and UTF-8's errors are ValueErrors too
            raise ValueError(f"{path}: {problem}") from None

    def save(self, path: str | Path) -> None:
        """Write a results.json."""
        Path(path).write_text(self.to_json(), encoding="utf-8")


def versions() -> dict[str, str]:
    """The installed versions of `REPORTED_VERSIONS`, without local parts such as "+cpu"."""
    return {name: str(import_module(name).__version__).partition("+")[0] for name in REPORTED_VERSIONS}


def _check_alike(converted: Sequence[Metric], other: Sequence[Metric], name: str) -> None:
    """Refuse another model whose metrics are not those of the converted one: the card shows them side by side."""
    ours, theirs = ([(figure.name, figure.higher_is_better) for figure in side] for side in (converted, other))
    if ours != theirs:
        raise ValueError(f"{name} must be the same as converted.{name.partition('.')[2]}, in the same order.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names all differ. Of two equal names, the json module would silently take the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"repeated fields: {', '.join(sorted({n for n in names if names.count(n) > 1}))}.")
    return found
