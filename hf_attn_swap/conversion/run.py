"""The engine of a conversion: it does the steps, measures each, keeps what loses less, and knows the way back.

A step is a function of a `Run`. It changes the model by `Run.apply`, under a name. What was done under a name stands in
the journal, so a killed conversion goes on after the last of them, and in the report, with what the model then lost.
Between two calls of `apply`, a step reads and changes nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments, set_seed

from ..layer.swap import Swap
from ..measuring.held_out import HeldOut
from ..measuring.lost import Lost
from ..patch import need_installation
from ..text.bar import line
from ..wiring.install import Installation, installation_of, model_root
from .config import ConvertConfig, Distil
from .distributed import broadcast_from_rank0
from .journal import Journal, Snapshot, copied, given_back, put, taken
from .report import ConversionReport, Sensitivity, StepRecord, in_words
from .rows import Rows
from .trainable import own_precision, with_adapters
from .trainer import Teacher, merge_adapters

R = TypeVar("R")
FEW_TOKENS = 256  # per training step: a small batch makes more of every token


def rows_per_step(stage: Distil, rows: Rows, processes: int = 1) -> int:
    """The rows of a training step of `convert`. Each process reads as many as one alone would."""
    return processes * (stage.batch or max(1, round(FEW_TOKENS / (rows.length or FEW_TOKENS))))


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


class Trial:
    """A change that is taken back unless it is kept; see `Run.trial`."""

    def __init__(self, before: Lost) -> None:
        self.lost, self.kept = before, False

    def keep_if_better(self, lost: Lost) -> bool:
        """Keep the change if the model loses less with it than before."""
        if lost.degradation < self.lost.degradation:
            self.lost, self.kept = lost, True
        return self.kept


@dataclass(kw_only=True)
class Run:
    """A conversion in progress.

    Attributes:
        model: the model.
        config: what was asked for.
        rows: the training rows.
        args: the arguments of its trainings.
        folder: where checkpoints of a training go.
        journal: what the steps gave, in a file.
        held: the held-out rows; None if no losses are measured, as in the recipes.
        held_rows: their number.
        teacher: another model that gives the targets.
        budget: what may still be read.
        progress: show progress bars.
        record: what each step did, a row of the report each.
        sentences: what steps say of what they did, for the report.
        kept: why a layer kept its own attention, by the layer's number.
        changed: a training is in the weights.
        final: the weights have changed for good, and there is no way back.
        adapters: PEFT's wrapper around the model, while adapters train.
        original: the teacher of the trainings, once there is one.
        originals: the values, before any step, of the parameters that steps have changed, on the CPU.
    """

    model: nn.Module
    config: ConvertConfig
    rows: Rows
    args: TrainingArguments
    folder: Path
    journal: Journal
    held: HeldOut | None = None
    held_rows: int = 0
    teacher: PreTrainedModel | None = None
    budget: Budget = field(default_factory=Budget)
    progress: bool = True
    record: list[StepRecord] = field(default_factory=list)
    sentences: list[str] = field(default_factory=list)
    kept: dict[int, str] = field(default_factory=dict)
    changed: bool = False
    final: bool = False
    adapters: PeftModel | None = None
    original: Teacher | None = None
    originals: dict[nn.Parameter, Tensor] = field(default_factory=dict)
    _names: set[str] = field(default_factory=set)
    _row: tuple[str, Lost] | None = None

    # -- Steps ---------------------------------------------------------------------------------------------------------

    def apply(
        self,
        name: str,
        work: Callable[[], R],
        *,
        measured: bool = True,
        again: bool = False,
        read: Callable[[Any], R] = lambda plain: plain,
    ) -> R:
        """Do what changes the model, or take over what it left in an earlier run.

        Args:
            name: in the journal, and in the report.
            work: does the work. Its result is plain data, or a dataclass of plain data.
            measured: the loss is measured afterwards, and stands in the report.
            again: a resumed conversion does the work again, because it is quick and always gives the same. Otherwise it
                reads what the work has left.
            read: makes the result from its plain data.

        Returns:
            The result of the work.

        Raises:
            ValueError: the name was used before.
        """
        if name in self._names:
            raise ValueError(f"two parts of a conversion are called {name!r}; give one of them another name.")
        self._names.add(name)
        start, left, self._row = time.perf_counter(), self.budget.left, None
        known = self.journal.recall(name)
        if known is None or again:
            result = work()
        else:
            result = read(known["result"])
            self._take_over(known["left"], self.journal.load(name))
        if known is not None:
            row = known["row"] and StepRecord.from_dict(known["row"])
        else:
            if not again:  # what the step has chosen
                result, self.sentences = broadcast_from_rank0((result, self.sentences), self.args)
            row = self._measure(name, left - self.budget.left, start) if measured and self.held is not None else None
            self._write(name, None if again else result, row, again=again)
        if row is not None:
            self.record.append(row)
        return result

    def measured(self, name: str, lost: Lost) -> None:
        """Tell `apply` what the model loses now, and under which name it stands in the report."""
        self._row = (name, lost)

    def best_of(self, name: str, candidates: Mapping[str, Callable[[], object]], *, unchanged: str) -> None:
        """Keep the change that loses least, or none.

        Args:
            name: of the choice.
            candidates: changes by name. Each begins where the one before it ended.
            unchanged: the name of the model as it is.
        """

        def choose() -> None:
            best, least, snapshot = unchanged, self.record[-1].lost, self.snapshot()
            for candidate, change in candidates.items():
                change()
                lost = self.lost()
                if lost.divergence_or_error < least.divergence_or_error:
                    best, least, snapshot = candidate, lost, self.snapshot()
            self.restore(snapshot)
            self.measured(f"{name}: {best}", least)

        self.apply(name, choose)

    @contextlib.contextmanager
    def trial(self, name: str, before: Lost, undo: Callable[[], object] | None = None) -> Iterator[Trial]:
        """Inside, the model may change. Afterwards it is as before, unless `Trial.keep_if_better` has kept the change.

        Args:
            name: in the report, with ", taken back" if it was not kept.
            before: what the model loses without the change.
            undo: takes the change back; None goes back to a snapshot.
        """
        snapshot = self.snapshot() if undo is None else None
        trial = Trial(before)
        try:
            yield trial
        finally:
            if not trial.kept and undo is not None:
                undo()
            elif not trial.kept and snapshot is not None:
                self.restore(snapshot)
            self.measured(name if trial.kept else f"{name}, taken back", trial.lost)

    @contextlib.contextmanager
    def restore_on_error(self) -> Iterator[None]:
        """Make the model the stock model again after an error, which stays the error that is raised."""
        try:
            yield
        except BaseException as error:
            try:
                self.undo()
            except Exception as problem:  # noqa: BLE001  # anything may be broken now, and the first error says why
                if hasattr(error, "add_note"):  # since Python 3.11
                    error.add_note(f"The model could not be made the stock model again ({problem}); load it anew.")
            raise

    def say(self, sentence: str) -> None:
        """Leave a sentence on what a step did, for the report."""
        self.sentences.append(sentence)

    def report(
        self, sensitivity: Sensitivity | None = None, head_sensitivity: Sensitivity | None = None
    ) -> ConversionReport:
        """What the steps did, and what each layer and head alone cost if they were selected."""
        assert self.held is not None
        processes, stage = self.args.world_size, self.config.distil
        sentences = list(self.sentences)
        if processes > 1 and any(step.tokens for step in self.record):
            count = f"{processes} x {rows_per_step(stage, self.rows)} rows"
            sentences.append(f"{processes} processes trained together, so a training step read {count}.")
        return ConversionReport(
            model=type(model_root(self.model)).__name__,
            variant=self.variant,
            steps=tuple(self.record),
            said=tuple(sentences),
            kept=self.kept,
            max_loss=self.config.max_loss,
            min_recall=self.config.min_recall,
            sensitivity=sensitivity,
            head_sensitivity=head_sensitivity,
            unit=self.rows.unit,
            held_out=self.held_rows,
            row_length=self.rows.length,
            train_rows=len(self.rows),
            rows_per_step=rows_per_step(stage, self.rows, processes),
            learning_rate=stage.learning_rate,
            trained=self.changed,
        )

    # -- The model -----------------------------------------------------------------------------------------------------

    @property
    def installation(self) -> Installation:
        """The swaps of the model."""
        return need_installation(self.model)

    @property
    def swaps(self) -> dict[int, list[Swap]]:
        """The swaps by the number of the layer, with PEFT's copies; none before the first step."""
        installation = installation_of(model_root(self.model))
        return {} if installation is None else {layer.number: list(layer.copies) for layer in installation.layers()}

    @property
    def variant(self) -> str:
        """The name of the variant that the swaps have now."""
        return next(("+".join(copies[0].names) for copies in self.swaps.values()), self.config.variant)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that run the variant."""
        return tuple(number for number, copies in self.swaps.items() if copies[0].strength > 0)

    @property
    def student(self) -> nn.Module:
        """The model as it trains: with adapters around it, or as it is."""
        return self.model if self.adapters is None else self.adapters  # a compiled model has no truth value

    # -- What is lost --------------------------------------------------------------------------------------------------

    def lost(self) -> Lost:
        """What the model loses on the held-out rows, as it is; of several processes, what the first has measured."""
        assert self.held is not None
        with own_precision(self.student):
            lost = self.held.lost(self.student, progress=self.progress)
        return broadcast_from_rank0(lost, self.args)

    @property
    def within(self) -> bool:
        """True if the loss after the last step is within the budget of `convert`."""
        return self.config.allows(self.record[-1].lost)

    # -- Changing the model, and the way back --------------------------------------------------------------------------

    def keep(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keep the values of parameters that a step is about to change, so that they can be given back.

        A step calls this before it changes a weight. A weight of the head needs `HeldOut` with head_trains=True.
        """
        for parameter in parameters:
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
        adapters, self.adapters, self.original = self.adapters, None, None
        if merged:
            merge_adapters(adapters, self.installation)
        else:
            adapters.unload()
        there = {id(parameter) for parameter in self.model.parameters()}
        self.originals = {parameter: value for parameter, value in self.originals.items() if id(parameter) in there}

    def snapshot(self) -> Snapshot:
        """The values of the swaps, and of the weights that steps have changed."""
        inside = {id(parameter) for copies in self.swaps.values() for swap in copies for parameter in swap.parameters()}
        outside = {id(parameter) for parameter in self.student.parameters()} - inside
        return taken(self.swaps, [parameter for parameter in self.originals if id(parameter) in outside], self.changed)

    def restore(self, snapshot: Snapshot) -> None:
        """Give the model the values of a snapshot; weights that were not changed then get their first values."""
        self.keep(snapshot.weights)
        put({parameter: value for parameter, value in self.originals.items() if parameter not in snapshot.weights})
        given_back(snapshot, self.swaps)
        self.changed = snapshot.changed
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

    def _measure(self, name: str, tokens: int, start: float) -> StepRecord:
        """Measure the model as it is, unless the step has said what is lost."""
        title, lost = self._row or (name, self.lost())
        seconds = time.perf_counter() - start
        row = StepRecord(name=title, layers=self.layers, lost=lost, tokens=tokens, seconds=seconds)
        if self.progress:
            line(f"{row.name}: {len(row.layers)} layers, {row.lost.measure} {in_words(row.lost)}")
        return row

    def _write(self, name: str, result: Any, row: StepRecord | None, *, again: bool) -> None:
        """Keep what a step has left, unless it is quick and done again."""
        if self.journal.folder is None:
            return
        entry: dict[str, Any] = {"row": row and asdict(row)}
        tensors = None
        if not again:
            snapshot = self.snapshot()
            tensors = snapshot.named(self.student)
            entry["left"] = {
                "held": snapshot.held,
                "changed": snapshot.changed,
                "rank": None if self.adapters is None else self.adapters.active_peft_config.r,
                "budget": asdict(self.budget),
                "sentences": list(self.sentences),  # later steps go on writing
            }
            entry["result"] = asdict(result) if is_dataclass(result) and not isinstance(result, type) else result
        self.journal.write(name, entry, tensors)

    def _take_over(self, left: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Take over what `_write` kept in an earlier run."""
        if left["rank"] is not None and self.adapters is None:
            self.adapt(left["rank"])
        if left["rank"] is None:
            self.leave_adapters(merged=False)
        self.restore(Snapshot.read(left["held"], tensors, left["changed"], self.student))
        self.budget = Budget(**left["budget"])
        self.sentences = list(left["sentences"])
