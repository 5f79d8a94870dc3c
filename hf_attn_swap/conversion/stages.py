"""What a user names: the stages of a conversion, each with its values. `convert(stages=...)` and the recipes take them.

A YAML file holds them as a list, in the order in which a run takes them. The name alone takes the usual values:

    stages:
      - {stage: calibrate, fit: gain}
      - {stage: distil, tokens: 300000, rank: 32, learning_rate: 5.0e-4}
      - fine_tune

On a command line, a stage is its name, or the same mapping as JSON. A list that starts with fine_tune converts the
fine-tuned control of the same seed, and needs no labels after that.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..layer.calibration import check_fit
from .losses import Losses
from .trainable import BODY

FINE_TUNE = "fine_tune"


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Least squares per head, on the first training rows.

    Attributes:
        fit: "gain" or "map".
        rows: the number of training rows.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "calibrate"
    fit: str = "map"
    rows: int = 512

    def __post_init__(self) -> None:
        check_fit(self.fit)
        _positive(self, "rows")

    @property
    def recorded(self) -> str:
        """The name of this stage in the record of a run."""
        return self.fit


@dataclass(frozen=True, kw_only=True)
class Distil(Losses):
    """Distillation without labels, by these losses; the teacher is the original model.

    Attributes:
        epochs: passes over the training rows, in a recipe.
        tokens: the budget in tokens, in place of `epochs`.
        learning_rate: the highest learning rate.
        rank: the rank of LoRA adapters on all linear layers, which are merged at the end; None trains `trainable`.
        trainable: the parts that train without adapters, as in `DistillationTrainer`; "body" is everything but the
            embeddings.
        batch: rows per training step and process; None takes the recipe's.

    Raises:
        ValueError: a value is out of range, or would have no effect beside the others.
    """

    name: ClassVar[str] = "distil"
    epochs: float = 1.0
    tokens: int | None = None
    learning_rate: float = 1e-4
    rank: int | None = None
    trainable: tuple[str, ...] = ("body",)
    batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "trainable", _names(self.trainable))
        _positive(self, "epochs", "tokens", "learning_rate", "rank", "batch")
        _one_budget(self)
        if self.rank is not None and self.trainable != (BODY,):
            raise ValueError("distil: with a rank, adapters train; leave out trainable, or the rank.")

    @property
    def recorded(self) -> str:
        """The name of this stage in the record of a run."""
        return "distil"


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """The recipe's own training, with labels. First in the list, the run starts from the fine-tuned control."""

    name: ClassVar[str] = FINE_TUNE

    @property
    def recorded(self) -> str:
        """The name of this stage in the record of a run."""
        return FINE_TUNE


Stage = Calibrate | Distil | FineTune
KINDS: dict[str, type[Stage]] = {kind.name: kind for kind in (Calibrate, Distil, FineTune)}


def read_stages(entries: Sequence[str]) -> tuple[Stage, ...]:
    """Read stages from names and JSON texts; see the head of this file.

    Raises:
        ValueError: a text is neither a name nor a JSON object, a stage or an option is unknown, a value is out of
            range, or fine_tune is neither first nor last.
    """
    stages = tuple(_read(entry) for entry in entries)
    for place, stage in enumerate(stages):
        if isinstance(stage, FineTune) and place not in (0, len(stages) - 1):
            raise ValueError("the stage fine_tune must be the first or the last.")
    return stages


def _read(entry: str) -> Stage:
    if entry in KINDS:
        return KINDS[entry]()
    try:
        values = json.loads(entry)
    except json.JSONDecodeError as problem:
        raise ValueError(
            f"a stage must be one of {', '.join(KINDS)}, or a JSON object, got {entry!r} ({problem})."
        ) from None
    name = values.pop("stage", None) if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"a stage must name one of {', '.join(KINDS)}, got {entry!r}.")
    kind = KINDS[name]
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"the stage {name} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    try:
        return kind(**values)
    except TypeError as problem:  # a value of another type, such as text instead of a number
        raise ValueError(f"the stage {name} cannot have these values: {entry} ({problem}).") from None


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _one_budget(stage: Distil) -> None:
    """Refuse two budgets at once.

    Raises:
        ValueError: there are tokens and epochs.
    """
    if stage.tokens is not None and stage.epochs != type(stage).epochs:
        raise ValueError(f"{stage.name}: give tokens or epochs, not both.")


def _positive(stage: Any, *names: str) -> None:
    """Refuse a number that is not above 0.

    Raises:
        ValueError: a number is not above 0.
    """
    for name in names:
        value = getattr(stage, name)
        if value is not None and not value > 0:
            raise ValueError(f"{stage.name}: {name} must be above 0, got {value!r}.")
