"""Step 7: the original model teaches the swapped model, group of layers by group of layers.

If the tokens are used up before a group is within the budget, the group is taken back. Where no budget chooses the
layers, the model gets back the weights with which it lost least: before the training, or after an earlier part of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from transformers import TrainerCallback

from ...patch import set_strength
from ..adapters import adapted_weights
from ..engine import Found, Part, Step
from ..lesson import epochs_of, exhausted, rows_read, share_of_budget
from ..outcome import UNDONE, StepRecord, in_words
from ..preserve_training_state import preserve_training_flags
from ..progress import quiet
from ..snapshot import Snapshot
from ..stages import Distil
from ..state import State
from ..teach import teach

CHECKS = 4  # measurements within one training
ROUNDING = 1e-4  # KL or relative error: smaller losses are within the rounding, and count as equal
COSTLY, ABOVE = "its swap costs most", "the loss would be above the budget"
WHOLE = "all its heads keep all keys"


def distil(state: State) -> Iterator[Part]:
    """Distil group after group, as far as the budgets go."""
    groups, choosing, plan = state.notes["groups"], state.notes["choosing"], state.config.plan
    every = list(state.swaps)
    why = WHOLE if state.config.heads is not None else COSTLY
    state.kept = {index: why for index in every if not any(index in group for group in groups)}
    for number, group in enumerate(groups):
        before = state.snapshot() if choosing else None
        if len(group) < len(every):  # else these layers together have been measured already
            running = list(itertools.chain(*groups[: number + 1]))
            name = f"group {number + 1} swapped" if choosing else "layers chosen"
            yield Part(name, partial(_run_in, running), again=True)
        best, weights = state.record[-1], None
        for place, stage in enumerate(itertools.chain(plan.distil, itertools.repeat(plan.last)), 1):
            if exhausted(state) or state.within:
                break
            if not choosing and best is state.record[-1]:
                weights = state.snapshot()
            budget = _tokens(stage, place - len(plan.distil), state.budget.free, len(groups) - number)
            name = f"{'align' if stage.aligns else 'distil'} {f'{number + 1}.{place}' if choosing else place}"
            yield Part(name, partial(train, stage, max(1, budget), name))
            if _order(state, state.record[-1]) <= _order(state, best):
                best = state.record[-1]
        if before is not None and not state.within:
            ran = list(itertools.chain(*groups[:number]))
            yield Part("last group taken back", partial(_take_back, before, ran), again=True)
            state.kept |= {index: ABOVE for later in groups[number:] for index in later}
            break
        if weights is not None and best is not state.record[-1]:
            yield Part(UNDONE, partial(_undo_training, weights, best, state.record[-1]), again=True)


def distilled(stage: Distil, name: str) -> Step:
    """The step that takes a `Distil` of a recipe."""

    def run(state: State) -> None:
        lesson = epochs_of(state, stage, name)
        what = f"{', '.join(stage.trainable)} trained"
        with preserve_training_flags(state.model):
            teach(state, stage, lesson)
            if state.adapters is not None:
                what = f"LoRA of rank {stage.rank}, merged"
                state.keep(adapted_weights(state.adapters))
                state.leave_adapters(merged=True)
        state.taught = None  # what trains in the next stage is another part of the model
        state.say(
            f"Distilled without labels from the original model: {lesson.words}, {what}, loss "
            f"{stage.losses.words}, learning rate {stage.learning_rate:g}."
        )

    run.__name__ = name
    return run


class StopWithin(TrainerCallback):
    """Measures the loss a few times during a training, and stops the training when it is within the budget."""

    def __init__(self, state: State) -> None:
        self.conversion = state

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure at each quarter of the training steps."""
        config = self.conversion.config
        every = max(1, state.max_steps // CHECKS)
        if not config.budgeted or state.global_step % every or state.global_step >= state.max_steps:
            return
        if config.allows(self.conversion.lost()):
            control.should_training_stop = True
            control.should_save = False  # a run that goes on from this very training step would not stop here


def _run_in(layers: Sequence[int], state: State) -> None:
    """Let the variant run in these layers alone."""
    set_strength(state.model, 0.0)
    if layers:
        set_strength(state.model, 1.0, layers=layers)


def train(stage: Distil, budget: int, name: str, state: State) -> None:
    """Distil for at most so many tokens."""
    lesson = share_of_budget(state, stage, budget, name)
    show = partial(quiet, name=name, shown=state.progress)
    training_steps = teach(state, stage, lesson, callbacks=[StopWithin(state)], prepare=show)
    rows = rows_read(lesson, training_steps)
    state.budget.read += rows
    state.budget.left -= round(rows * (state.rows.length or 1))


def _take_back(before: Snapshot, ran: Sequence[int], state: State) -> None:
    """Undo the last group: its layers run their own attention again, with the weights from before."""
    state.restore(before)
    _run_in(ran, state)


def _tokens(stage: Distil, behind: int, free: int, groups: int) -> int:
    """The tokens of the next part of a group's distillation.

    A stage before the last takes its own number. The last stage takes an equal share of what is free for each group
    that is left. Each part behind it, which the loss of this group needs, takes all that is free.

    Args:
        stage: the stage.
        behind: the place of the part behind the plan's last stage; below 0 before it.
        free: what is free of the budget.
        groups: the number of groups that are left, with this one.
    """
    if behind < 0:
        return stage.tokens or free
    return free // groups if behind == 0 else free


def _order(state: State, row: StepRecord) -> tuple[bool, float]:
    """The smaller, the better: what is within a budget comes first, then what loses less; no number comes last."""
    cost = math.inf if math.isnan(row.lost.divergence_or_error) else max(ROUNDING, row.lost.divergence_or_error)
    return not state.config.allows(row.lost), cost


def _undo_training(weights: Snapshot, best: StepRecord, last: StepRecord, state: State) -> Found:
    """Go back to the weights with which the model lost least."""
    state.restore(weights)
    if not state.changed:
        state.leave_adapters(merged=False)
    state.say(
        f"Training hurt, so it was taken back to {best.name!r}: {in_words(best.lost)} lost there "
        f"({best.lost.divergence_or_error:.3g} by the loss that trains), {in_words(last.lost)} after {last.name!r} "
        f"({last.lost.divergence_or_error:.3g})."
    )
    return Found(lost=best.lost)
