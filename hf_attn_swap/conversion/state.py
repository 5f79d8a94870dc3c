"""The state of a conversion: what its steps work on, what they have done so far, and the way back."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import FullyShardedDataParallelPlugin
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments, set_seed

from ..layer.swap import Swap
from ..measuring.held_out import HeldOut
from ..measuring.lost import Lost
from ..patch import need_installation
from ..wiring.install import Installation, installation_of, model_root
from .adapters import with_adapters
from .distillation import merge_adapters
from .journal import Journal
from .outcome import StepRecord
from .plan import Plan
from .preserve_training_state import own_precision
from .processes import broadcast_from_rank0
from .rows import Rows
from .snapshot import Snapshot, copied, given_back, put, taken
from .split_copy import SplitCopy
from .teacher import Teacher


@dataclass(frozen=True, kw_only=True)
class ConvertConfig:
    """What `convert` was asked for. The names are those of its arguments; `layers` is None for all layers."""

    variant: str
    options: dict[str, Any]
    layers: Any
    modules: str | None
    max_loss: float | None
    keep: float
    absorb: bool
    processor: Any
    low_memory: bool
    bits: int | None
    plan: Plan
    min_recall: float | None = None
    recall_distance: int | None = None
    heads: str | None = None

    @property
    def budgeted(self) -> bool:
        """True if there is a budget for the loss, or for recall."""
        return self.max_loss is not None or self.min_recall is not None

    def allows(self, lost: Lost) -> bool:
        """True if there is a budget, and a loss is within it."""
        return self.budgeted and lost.within(self.max_loss, self.min_recall)


@dataclass
class Budget:
    """What may still be read.

    Attributes:
        left: the tokens that are left (patches of images, rows of other data).
        read: the number of training rows that were read.
        reserved: so many of the tokens that are left are for the training with rounding.
    """

    left: int = 0
    read: int = 0
    reserved: int = 0

    @property
    def free(self) -> int:
        """The tokens that are left and not reserved."""
        return self.left - self.reserved


@dataclass(kw_only=True)
class State:
    """A conversion in progress.

    Attributes:
        model: the model.
        rows: the training rows.
        args: the arguments of its trainings.
        folder: where checkpoints of a training go.
        journal: what the steps gave, in a file.
        held: the held-out rows; None if no losses are measured, as in the recipes.
        teacher: another model that gives the targets.
        request: what `convert` was asked for; None in the recipes.
        budget: what may still be read.
        progress: show progress bars.
        record: what each step did, a row of the report each.
        notes: plain data that steps leave for later steps, for the report and for the journal.
        kept: why a layer kept its own attention, by the layer's number.
        changed: a training is in the weights.
        final: the weights have changed for good, and there is no way back.
        adapters: PEFT's wrapper around the model, while adapters train.
        taught: the teacher of the trainings, once there is one.
        parts: the names of the parts that were taken.
        originals: the values, before any step, of the parameters that steps have changed, on the CPU.
        fsdp: how FSDP2 splits a copy of the student while it trains; None if the student itself trains.
        apart: this copy, during a training.
    """

    model: nn.Module
    rows: Rows
    args: TrainingArguments
    folder: Path
    journal: Journal
    held: HeldOut | None = None
    teacher: PreTrainedModel | None = None
    request: ConvertConfig | None = None
    budget: Budget = field(default_factory=Budget)
    progress: bool = True
    record: list[StepRecord] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)
    kept: dict[int, str] = field(default_factory=dict)
    changed: bool = False
    final: bool = False
    adapters: PeftModel | None = None
    taught: Teacher | None = None
    parts: set[str] = field(default_factory=set)
    originals: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    fsdp: FullyShardedDataParallelPlugin | None = None
    apart: SplitCopy | None = None

    # -- The model -----------------------------------------------------------------------------------------------------

    @property
    def config(self) -> ConvertConfig:
        """What `convert` was asked for."""
        assert self.request is not None, "this step belongs to convert"
        return self.request

    @property
    def installation(self) -> Installation:
        """The swaps of the model."""
        return need_installation(self.model)

    @property
    def swaps(self) -> dict[int, list[Swap]]:
        """The swaps by the number of the layer, with PEFT's copies; none before the first step."""
        installation = installation_of(model_root(self.model))
        return {} if installation is None else {each.number: list(each.copies) for each in installation.layers()}

    @property
    def variant(self) -> str:
        """The name of the variant that the swaps have now."""
        return next(("+".join(group[0].names) for group in self.swaps.values()), self.config.variant)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that run the variant."""
        return tuple(index for index, swaps in self.swaps.items() if swaps[0].strength > 0)

    @property
    def student(self) -> nn.Module:
        """The model as it trains: with adapters around it, or as it is."""
        return self.model if self.adapters is None else self.adapters  # a compiled model has no truth value

    # -- What is lost --------------------------------------------------------------------------------------------------

    def lost(self) -> Lost:
        """What the model loses on the held-out rows, as it is; of several processes, what the first has measured."""
        assert self.held is not None
        learnt = contextlib.nullcontext() if self.apart is None else self.apart.learnt()
        with learnt, own_precision(self.student):
            found = self.held.lost(self.student, progress=self.progress)
        return broadcast_from_rank0(found, self.args)

    @property
    def within(self) -> bool:
        """True if the loss after the last step is within the budget of `convert`."""
        return self.config.allows(self.record[-1].lost)

    def say(self, sentence: str) -> None:
        """Leave a sentence on what a step did, for the report."""
        self.notes.setdefault("sentences", []).append(sentence)

    # -- Changing the model, and the way back --------------------------------------------------------------------------

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the values of parameters that a step is about to change, so that they can be given back.

        A step calls this before it changes a weight.

        Raises:
            ValueError: the losses are measured by a head with this weight.
        """
        for parameter in parameters:
            if self.held is not None and self.held.needs_head(parameter):
                raise ValueError(
                    "a step changes the head, by which the held-out rows measure what the stock model gives; make "
                    "HeldOut with head_trains=True."
                )
            if parameter not in self.originals:
                self.originals[parameter] = copied(parameter)

    def adapt(self, rank: int) -> None:
        """Put new adapters around the model, which change nothing yet. Their first numbers are always the same."""
        set_seed(self.args.seed)
        self.adapters = with_adapters(model_root(self.model), rank)

    def leave_adapters(self, *, merged: bool) -> None:
        """Take the adapters off: merged into the weights, or without what they have learnt."""
        if self.adapters is None:
            return
        adapters, self.adapters, self.taught = self.adapters, None, None
        if merged:
            merge_adapters(adapters, self.installation)
        else:
            adapters.unload()
        there = {id(parameter) for parameter in self.model.parameters()}
        self.originals = {each: value for each, value in self.originals.items() if id(each) in there}

    def snapshot(self) -> Snapshot:
        """The values of the swaps, and of the weights that steps have changed."""
        inside = {id(each) for group in self.swaps.values() for swap in group for each in swap.parameters()}
        outside = {id(each) for each in self.student.parameters()} - inside
        found = taken(self.swaps, [each for each in self.originals if id(each) in outside])
        return Snapshot({"swaps": found.plain, "changed": self.changed}, found.swaps, found.weights)

    def restore(self, snapshot: Snapshot) -> None:
        """Give the model the values of a snapshot; weights that were not changed then get their first values."""
        self.keep(snapshot.weights)
        put({each: value for each, value in self.originals.items() if each not in snapshot.weights})
        given_back(Snapshot(snapshot.plain["swaps"], snapshot.swaps, snapshot.weights), self.swaps)
        self.changed = snapshot.plain["changed"]
        if self.swaps:  # none before the first swap
            self.installation.refresh()

    def undo(self) -> None:
        """Make the model the stock model again, after an error; unless its weights have changed for good."""
        if self.final:
            return
        if self.adapters is not None:
            self.adapters.unload()
        if (installation := installation_of(model_root(self.model))) is not None:
            installation.remove(self.model)
        put(self.originals)  # at last: the first values know nothing of the scales that leave with a smoothing

    # -- The journal ---------------------------------------------------------------------------------------------------

    def written(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """All that a step leaves, as plain data and as tensors."""
        found = self.snapshot()
        rank = None if self.adapters is None else self.adapters.active_peft_config.r
        plain = {
            "model": found.plain,
            "rank": rank,
            "left": self.budget.left,
            "read": self.budget.read,
            "reserved": self.budget.reserved,
            "notes": copy.deepcopy(self.notes),  # later steps go on writing
        }
        return plain, found.named(self.student)

    def read(self, plain: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take over what `written` gave in an earlier run."""
        if plain["rank"] is not None and self.adapters is None:
            self.adapt(plain["rank"])
        if plain["rank"] is None:
            self.leave_adapters(merged=False)
        self.restore(Snapshot.read(plain["model"], tensors, self.student))
        self.budget = Budget(left=plain["left"], read=plain["read"], reserved=plain["reserved"])
        self.notes = copy.deepcopy(plain["notes"])
