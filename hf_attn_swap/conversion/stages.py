"""The stages of a conversion as recipes name them: calibrate, align, distil and fine_tune, each with its budget.

A YAML file holds them as a list, in the order in which a run takes them:

    stages:
      - {stage: calibrate, fit: gain}
      - {stage: align, epochs: 1}
      - {stage: distil, tokens: 300000, rank: 32, learning_rate: 5.0e-4}
      - {stage: fine_tune}

On a command line, a stage is the same mapping as JSON. A list that starts with fine_tune converts the fine-tuned
control of the same seed, and needs no labels after that.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..layer.calibration import check_fit
from .distillation import Losses
from .schedule import StrengthSchedule

FINE_TUNE = "fine_tune"


@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Least squares per head, on the first training rows.

    Attributes:
        fit: "gain" or "map".
        rows: the number of training rows.
        source: the attention that the weights were trained with.
        neutral_start: let the skip of pre-norm layers start at almost nothing.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "calibrate"
    fit: str = "map"
    rows: int = 512
    source: str = "softmax"
    neutral_start: bool = True

    def __post_init__(self) -> None:
        check_fit(self.fit)
        _positive(self, "rows")

    @property
    def step(self) -> str:
        """The name of this stage in a record."""
        return self.fit


@dataclass(frozen=True, kw_only=True)
class Align:
    """Attention transfer: every swapped layer learns what the original attention gives on the same input.

    Attributes:
        epochs: passes over the training rows.
        tokens: the budget in tokens, in place of `epochs`.
        learning_rate: the highest learning rate.
        trainable: the parts that train, as in `AttentionTransferTrainer`.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "align"
    epochs: float = 1.0
    tokens: int | None = None
    learning_rate: float = 1e-3
    trainable: tuple[str, ...] = ("query", "key", "swap")

    def __post_init__(self) -> None:
        object.__setattr__(self, "trainable", _names(self.trainable))
        _positive(self, "epochs", "tokens", "learning_rate")

    @property
    def step(self) -> str:
        """The name of this stage in a record."""
        return "transfer"


@dataclass(frozen=True, kw_only=True)
class Distil(Losses):
    """Distillation without labels; the teacher is the model before the swap.

    Attributes:
        epochs: passes over the training rows.
        tokens: the budget in tokens, in place of `epochs`.
        learning_rate: the highest learning rate.
        rank: the rank of LoRA adapters on all linear layers, which are merged at the end; None trains `trainable`.
        trainable: the parts that train without adapters, as in `DistillationTrainer`; "body" is everything but the
            embeddings.
        batch: rows per step and process; None takes the recipe's.
        schedule_share: the strength rises from 0 over this share of the steps; 0 is strength 1 from the first step.
        schedule_order: all layers "together", or one after another, "up" from the first or "down" from the last.

    Raises:
        ValueError: a value is out of range.
    """

    name: ClassVar[str] = "distil"
    epochs: float = 1.0
    tokens: int | None = None
    learning_rate: float = 1e-4
    rank: int | None = None
    trainable: tuple[str, ...] = ("body",)
    batch: int | None = None
    schedule_share: float = 0.0
    schedule_order: str = "together"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "trainable", _names(self.trainable))
        _positive(self, "epochs", "tokens", "learning_rate", "rank", "batch")
        StrengthSchedule(share=self.schedule_share, order=self.schedule_order)

    @property
    def step(self) -> str:
        """The name of this stage in a record."""
        return "distil"

    @property
    def schedule(self) -> StrengthSchedule | None:
        """Moves the strength during the training; None if the strength stays."""
        if not self.schedule_share:
            return None
        return StrengthSchedule(share=self.schedule_share, order=self.schedule_order)

    @property
    def aligns(self) -> bool:
        """True if only the swapped layers are compared, each with the original attention."""
        return not (self.logits or self.hidden)

    @property
    def losses(self) -> Losses:
        """The weights of the terms of the loss."""
        return Losses(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Losses)})


@dataclass(frozen=True, kw_only=True)
class FineTune:
    """The recipe's own training, with labels. First in the list, the run starts from the fine-tuned control."""

    name: ClassVar[str] = FINE_TUNE

    @property
    def step(self) -> str:
        """The name of this stage in a record."""
        return FINE_TUNE


Stage = Calibrate | Align | Distil | FineTune
KINDS: dict[str, type[Any]] = {kind.name: kind for kind in (Calibrate, Align, Distil, FineTune)}


def read_stages(entries: Sequence[str]) -> tuple[Stage, ...]:
    """Read stages from JSON texts; see the head of this file.

    Raises:
        ValueError: a text is no JSON object, a stage or an option is unknown, a value is out of range, fine_tune is
            neither first nor last, or align follows a stage that changes the weights.
    """
    stages = tuple(_read(entry) for entry in entries)
    for place, stage in enumerate(stages):
        if isinstance(stage, FineTune) and place not in (0, len(stages) - 1):
            raise ValueError("the stage fine_tune must be the first or the last.")
        if isinstance(stage, Align) and any(isinstance(before, (Align, Distil)) for before in stages[:place]):
            raise ValueError(
                "the stage align must come once, before distil: its teacher is the attention with the weights that "
                "this stage starts from."
            )
    return stages


def _read(entry: str) -> Stage:
    try:
        values = json.loads(entry)
    except json.JSONDecodeError as problem:
        raise ValueError(f"a stage must be a JSON object, got {entry!r} ({problem}).") from None
    name = values.pop("stage", None) if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"a stage must name one of {', '.join(KINDS)}, got {entry!r}.")
    kind = KINDS[name]
    known = {field.name for field in dataclasses.fields(kind)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"the stage {name} has no option {', '.join(unknown)}; it has {', '.join(sorted(known))}.")
    try:
        stage: Stage = kind(**values)
    except TypeError as problem:  # a value of another type, such as text in the place of a number
        raise ValueError(f"the stage {name} cannot have these values: {entry} ({problem}).") from None
    return stage


def _names(value: Any) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)


def _positive(stage: Any, *names: str) -> None:
    """Refuse a number that is not above 0.

    Raises:
        ValueError: a number is not above 0.
    """
    for name in names:
        value = getattr(stage, name)
        if value is not None and not value > 0:
            raise ValueError(f"{stage.name}: {name} must be above 0, got {value!r}.")
