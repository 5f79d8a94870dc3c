"""Converts a model to another attention by one call: swap, fit, choose the layers, distil, and measure after each step.

The steps, each measured on held-out rows:

    1. swap:       the variant in all layers that may be converted
    2. fit:        a neutral start, and no fit, a gain or a map per head, whichever loses least (or as `stages` say)
    3. layers:     with a budget or a share to keep, what each layer alone costs decides about the order
    4. distil:     the model before the swap teaches the swapped model, group of layers by group of layers

With a budget, the cheapest layers come first. A group whose loss comes within the budget is followed by the next group.
If the tokens are used up before, the last group is taken back. Without a choice of layers, a distillation that
diverged is taken back. Labels are not read by any step.
The method is this package's own; docs/mathematics.md, section Conversion.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments, set_seed

from ..layer.registry import canonical_keys, parse
from ..layer.swap import Swap
from ..measuring.batches import Batch, evaluating, forward, without_labels
from ..measuring.held_out import HeldOut
from ..measuring.lost import Lost
from ..patch import need_installation, patch_model, set_strength, unpatch_model
from ..variants.softmax import Softmax
from ..wiring.install import Installation, installation_of, model_root
from .as_before import as_before, own_precision
from .calibrate import calibrate
from .distillation import EVERYTHING, DistillationTrainer
from .journal import Journal, fingerprint
from .outcome import UNDONE, ConversionReport, Step, in_words
from .plan import Plan, plan_of
from .progress import quiet
from .rows import TOKENS, Rows, as_rows
from .sensitivity import Sensitivity, layer_sensitivity
from .stages import Calibrate, Distil, Stage
from .take import last_whole_checkpoint, with_adapters
from .teacher import Teacher, check_teacher, note_retrained, trains_the_original
from .value_scale import scale_values

FITS = ("gain", "map")
NO_FIT = "no fit"
SCALED = "scaled values"  # without a fit of the heads
CHECKS = 4  # measurements within one group's distillation
SAVE_EVERY = 100  # steps of a training between two checkpoints
GROUPS = 6  # groups of layers, when a budget decides how many layers are converted
FEWEST_HELD = 8  # rows that the loss is measured on
DIVERGED = 2  # a distillation is taken back if the loss is so many times larger than before it, or no number
ROUNDING = 1e-4  # KL or relative error: a smaller loss is within the rounding, and never says that training diverged
HELD_TOKENS = 8192  # tokens or patches that the loss is measured on, if there are many rows
HELD_ROWS = 64  # the same, for data that have neither
FEW_TOKENS = 256  # per step: a small batch makes more of every token


def convert(
    model: nn.Module,
    variant: str,
    data: Any,
    *,
    processor: Any = None,
    eval_data: Any = None,
    tokens: int = 300_000,
    max_loss: float | None = None,
    layers: Literal["auto"] | int | Iterable[int] = "auto",
    modules: str | None = None,
    keep: float = 0.0,
    stages: Sequence[Stage] | None = None,
    low_memory: bool = False,
    teacher: PreTrainedModel | None = None,
    length: int = 256,
    output_dir: str | Path | None = None,
    args: TrainingArguments | None = None,
    progress: bool = True,
    **options: Any,
) -> ConversionReport:
    """Convert a model to another attention, in place, and report what was lost.

        report = convert(model, "belief", texts, processor=tokenizer, max_loss=0.02)
        print(report)

    A model whose swaps are all the control `softmax`, as the recipes save their control, counts as a stock model; the
    conversion takes the place of these swaps.

    Args:
        model: a stock model, as from_pretrained returns it.
        variant: the name of the variant, or a composition such as "outeffhop+gated".
        data: texts, pairs of texts, images or rows that are ready, as in `as_rows`; labels are not read.
        processor: the tokenizer or image processor.
        eval_data: held-out data of the same kind, to measure on. None takes a twentieth of `data` (at least 8 rows,
            and at most some 8,000 tokens or patches), which the conversion then does not see. If held-out rows have
            labels, a classifier's accuracy is the measure, or the rank correlation of a regression.
        tokens: the budget of the distillation, in tokens of text; in patches, for images; in rows, for other data. A
            budget below one step trains nothing.
        max_loss: the largest loss, as a share (0.02 is 2 %) of what `Lost.share` names for this kind of model, such as
            perplexity. The conversion stops as soon as the loss is within this budget.
        layers: the layers to convert: numbers, or "auto" for all; with `max_loss`, "auto" means as many as the budget
            allows, the cheapest first.
        modules: convert only inside these modules, as in `patch_model`: "language_model" leaves the vision tower of a
            vision-language model as it is. `layers` then counts inside these modules.
        keep: the share of layers that keep their own attention: the costliest layers.
        stages: how to convert; None chooses by the kind and size of the model. At most one `Calibrate` comes first
            and names the fit. One or more `Distil` follow. The last takes what is left of `tokens`; each before it
            takes its own `tokens`, in each group of layers. `Distil(layers=1.0, logits=0.0, tokens=...)` aligns the
            swapped layers with the original ones. All train the same weights.
        low_memory: trade time for memory: adapters instead of all weights, one row at a time, and activations that
            are computed again in the backward pass. The steps have the same number of rows.
        teacher: another model that gives the targets, and that losses are compared with; None is the model itself.
        length: the number of tokens of a row, when `data` are texts.
        output_dir: a folder for checkpoints. The same call with the same folder goes on where the last one ended. None
            keeps nothing.
        args: more arguments of the training, such as `bf16=True` (without a GPU, transformers wants `use_cpu=True`
            beside it); the budget, the learning rate and the batch are set by `tokens` and `distil`, the folder and
            when to save by `output_dir`.
        progress: show progress bars.
        options: the options of the variant.

    Returns:
        The loss after every step, and what was converted. If `met` is False, the budget was missed: the model then
        runs the variant in no layer, or in the layers that were named (or left by `keep`), with the loss that the
        report gives. A layer that keeps its own attention loses its swap; if the variant carries scores
        (`modern_hopfield`), the swap stays at strength 0, since the converted layers above read what it carries.

    Raises:
        ValueError: the model is already converted, the data do not fit the model, an argument is out of range, or the
            folder holds another conversion. After an error the model is the stock model as it was; after an
            interruption of the last measurement, when the adapters are merged, it is the converted model.
    """
    root = model_root(model)
    refuse_converted(model)
    _refuse_adapters(model)
    variant = "+".join(cls.name for cls in parse(variant))
    _check_numbers(max_loss, keep, tokens)
    if teacher is not None:
        check_teacher(root, teacher)
    plan = plan_of(root, variant, stages, low_memory=low_memory)
    if installation_of(root) is not None:
        unpatch_model(model)  # the control `softmax`
    with contextlib.ExitStack() as inside:
        for each in (model,) if teacher is None else (model, teacher):
            inside.enter_context(as_before(each))
        train, held = _split(root, data, eval_data, processor, length)
        _try_longest(root, train)
        named = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else layers
        chosen: Any = None if named == "auto" else named
        settings = {
            "model": type(root).__name__,
            "weights": fingerprint(root.parameters()),
            "teacher": None if teacher is None else fingerprint(teacher.parameters()),
            "data": fingerprint(_ends(train) + _ends(held)),
            "variant": variant,
            "options": canonical_keys(options) if "+" in variant else options,
            "tokens": tokens,
            "max_loss": max_loss,
            "layers": chosen,
            "keep": keep,
            "stages": [{"stage": stage.name, **asdict(stage)} for stage in plan.stages],
            "low_memory": low_memory,
            "rows": len(train),
            "held_out": len(held),
            "length": train.length,
            **({} if modules is None else {"modules": modules}),
            **({"bf16": True} if args is not None and args.bf16 else {}),
        }
        folder = Path(inside.enter_context(tempfile.TemporaryDirectory())) if output_dir is None else Path(output_dir)
        args = args or TrainingArguments(output_dir=str(folder), report_to="none")
        head_trains = plan.last.rank is None and plan.last.trainable == (EVERYTHING,)
        batches = held.batches(1 if low_memory else _rows_per_step(plan.last, held))
        work = _Work(
            model=model,
            held=HeldOut(teacher or model, batches, head_trains=head_trains, as_it_is=True, progress=progress),
            train=train,
            plan=plan,
            low_memory=low_memory,
            teacher=teacher,
            journal=Journal(None if output_dir is None else folder, settings, writes=args.should_save),
            folder=folder,
            args=args,
            progress=progress,
            left=tokens,
        )
        patch_model(model, variant, layers=chosen, modules=modules, **options)
        try:
            swapped = work.note("swap")
            within = max_loss is not None and swapped.lost.share <= max_loss
            if plan.calibrate is not None or not within:
                _fit(work)
            groups, sensitivity, choosing = _groups(work, chosen is None, max_loss, keep)
            kept = _convert_groups(work, groups, max_loss, choosing)
        except BaseException:
            work.undo()
            raise
    return ConversionReport(
        model=type(root).__name__,
        variant=variant,
        steps=tuple(work.steps),
        kept=kept,
        max_loss=max_loss,
        sensitivity=sensitivity,
        unit=train.unit,
        held_out=len(held),
        row_length=train.length,
        train_rows=len(train),
        rows_per_step=_rows_per_step(plan.last, train),
        learning_rate=plan.last.learning_rate,
        trained=work.changed,
    )


def refuse_converted(model: nn.Module) -> None:
    """Refuse a model with another attention than stock attention or the control `softmax`, which computes the same.

    Raises:
        ValueError: a layer has another attention, or its control was calibrated to another attention.
    """
    installation = installation_of(model_root(model))
    swaps = [] if installation is None else [swap for layer in installation.layers() for swap in layer.copies]
    for swap in swaps:
        if swap.names != (Softmax.name,) or swap.calibration is not None or swap.merged is not None:
            raise ValueError("the model is already converted; load the stock model, or call unpatch_model first.")


def _refuse_adapters(model: nn.Module) -> None:
    """Refuse a model with adapters of the user's own: the conversion takes its own adapters off at the end.

    Raises:
        ValueError: the model has adapters of PEFT.
    """
    if any(isinstance(module, (BaseTunerLayer, ModulesToSaveWrapper)) for module in model.modules()):
        raise ValueError(
            "the model has adapters of PEFT, which a conversion would lose; merge them into the weights first: "
            "model = model.merge_and_unload()."
        )


def _check_numbers(max_loss: Any, keep: Any, tokens: Any) -> None:
    """Refuse numbers that are out of range, and texts such as "2%", which the command line alone reads.

    Raises:
        ValueError: one of them is.
    """
    if max_loss is not None and not (isinstance(max_loss, Real) and 0 < float(max_loss) <= 1):
        raise ValueError(f"max_loss is a share above 0 and at most 1 (0.02 is 2 %), got {max_loss!r}.")
    if not (isinstance(keep, Real) and 0 <= float(keep) < 1):
        raise ValueError(f"keep is the share of layers that stay as they are, from 0 to below 1, got {keep!r}.")
    if not (isinstance(tokens, Integral) and int(tokens) >= 1):
        raise ValueError(f"tokens must be a whole number of at least 1, such as 300_000, got {tokens!r}.")


@dataclass
class _Work:
    """A conversion in progress.

    Attributes:
        model, held, train, plan, low_memory, teacher, journal, folder, args, progress: as `convert` was given or has
            made them.
        left: the tokens of the budget that are left.
        order: the numbers of the training rows, in the order in which they are drawn.
        unread: the training rows that were drawn, and not read yet.
        changed: a training is in the weights.
        merged: the adapters are merged into the weights.
        steps: the record so far.
        student: the model as it trains, perhaps inside PEFT's wrapper; None before the first training.
        taught: the teacher; None before the first training.
        trainer: the last trainer.
        initial: the parameters that train, as they were before the first training.
    """

    model: nn.Module
    held: HeldOut
    train: Rows
    plan: Plan
    low_memory: bool
    teacher: PreTrainedModel | None
    journal: Journal
    folder: Path
    args: TrainingArguments
    progress: bool
    left: int
    unread: list[int] = field(default_factory=list)
    changed: bool = False
    merged: bool = False
    steps: list[Step] = field(default_factory=list)
    student: nn.Module | None = None
    taught: Teacher | None = None
    trainer: DistillationTrainer | None = None
    initial: dict[str, Tensor] = field(default_factory=dict)
    order: Iterator[int] = field(init=False)

    def __post_init__(self) -> None:
        self.order = self.train.order(_rows_per_step(self.plan.last, self.train))

    @property
    def installation(self) -> Installation:
        return need_installation(self.model)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that run the variant."""
        installation = installation_of(model_root(self.model))
        if installation is None:
            return ()
        return tuple(layer.number for layer in installation.layers() if layer.swap.strength > 0)

    def lost(self) -> Lost:
        """What the model loses on the held-out rows, as it is."""
        model = self.model if self.student is None else self.student  # a compiled model has no truth value
        with own_precision(model):
            return self.held.lost(model, progress=self.progress)

    def note(self, name: str, tokens: int = 0, since: float | None = None) -> Step:
        """Measure the model as it is, and add a step to the record."""
        if (known := self.journal.recall(name)) is not None:
            self.steps.append(Step.from_dict(known))
            return self.steps[-1]
        lost = self.lost()
        seconds = 0.0 if since is None else time.perf_counter() - since
        step = Step(name=name, layers=self.layers, lost=lost, tokens=tokens, seconds=seconds)
        self.steps.append(step)
        self.journal.record(name, asdict(step))
        if self.progress:
            tqdm.write(f"{name}: {len(step.layers)} layers, {lost.measure} {in_words(lost)}", file=sys.stderr)
        return step

    def trained(self) -> dict[str, Tensor]:
        """Copies of all parameters that train, on the CPU."""
        assert self.student is not None
        named = self.student.named_parameters()
        return {name: each.detach().cpu().clone() for name, each in named if each.requires_grad}

    def restore(self, values: dict[str, Tensor]) -> None:
        """Give the parameters that train the values of an earlier `trained`."""
        assert self.student is not None
        parameters = dict(self.student.named_parameters())
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(value)

    def teach(self, stage: Distil, budget: int, target: float | None, name: str) -> Step:
        """Distil for at most `budget` tokens, and stop when the loss is at most `target`."""
        start = time.perf_counter()
        if self.student is None:
            rank = stage.rank
            set_seed(self.args.seed)  # for the first numbers of the adapters
            self.student = self.model if rank is None else with_adapters(model_root(self.model), rank)
        each = self.train.length or 1
        count = max(1, int(min(budget, self.left) / each))
        self.unread += itertools.islice(self.order, max(0, count - len(self.unread)))
        check = _Check(self, target)
        trainer = DistillationTrainer(
            self.student,
            self._arguments(stage, name),
            teacher=self.taught or self.teacher,
            losses=stage.losses,
            trainable=None if stage.rank is not None else stage.trainable,
            train_dataset=self.train.some(self.unread[:count]).rows,
            data_collator=self.train.collate,
            callbacks=[check],
        )
        quiet(trainer, name, shown=self.progress)
        self.trainer, self.taught = trainer, trainer.teacher
        self.initial = self.initial or self.trained()
        if (known := self.journal.recall(f"train {name}")) is not None:
            self.restore(self.journal.load(name))
            if trains_the_original(self.student):
                note_retrained(self.installation)
            rows = known["rows"]
        else:
            folder = Path(trainer.args.output_dir or ".")
            trainer.train(resume_from_checkpoint=None if self.journal.folder is None else last_whole_checkpoint(folder))
            own = trainer.args
            step = own.train_batch_size * own.gradient_accumulation_steps * own.world_size
            rows = min(count, trainer.state.global_step * step)
            self.journal.save(name, self.trained())
            self.journal.record(f"train {name}", {"rows": rows})
        del self.unread[:rows]
        self.changed = True
        spent = round(rows * each)
        self.left -= spent
        return self.note(name, spent, start)

    @property
    def exhausted(self) -> bool:
        """True if what is left of the budget is less than one step."""
        return self.left < (self.train.length or 1) * _rows_per_step(self.plan.last, self.train)

    def _arguments(self, stage: Distil, name: str) -> TrainingArguments:
        """The arguments of one training."""
        rows = _rows_per_step(stage, self.train)
        memory: dict[str, Any] = {"per_device_train_batch_size": rows}
        if self.low_memory:
            new = hasattr(self.args, "activation_checkpointing")  # the name since transformers 5.23
            memory = {
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": rows,
                "activation_checkpointing" if new else "gradient_checkpointing": True,
            }
        return replace(
            self.args,
            output_dir=str(self.folder / name.replace(" ", "-")),
            num_train_epochs=1,
            max_steps=-1,
            train_sampling_strategy="sequential",  # `teach` has put the rows in a random order
            learning_rate=stage.learning_rate,
            lr_scheduler_type="cosine",
            lr_scheduler_kwargs=None,
            warmup_steps=0.05,
            weight_decay=0.0,
            **memory,
            remove_unused_columns=False,  # the collator leaves out what the model does not take
            save_strategy="no" if self.journal.folder is None else "steps",
            save_steps=SAVE_EVERY,
            save_total_limit=1,
            eval_strategy="no",
            eval_on_start=False,
            load_best_model_at_end=False,
            logging_strategy="steps" if self.progress else "no",
            logging_steps=10,
            disable_tqdm=not self.progress,
            dataloader_pin_memory=torch.cuda.is_available(),
        )

    def finish(self) -> None:
        """Take the adapters off, merged into the weights if they have learnt something, and measure the model."""
        if self.trainer is None or self.student is None:
            return
        if isinstance(self.student, PeftModel) and self.layers and self.changed:
            self.student = None
            self.trainer.merged()
            self.merged = True
            self.note("adapters merged")
            return
        self.leave_adapters()

    def leave_adapters(self) -> None:
        """End the training without what the adapters have learnt."""
        if isinstance(self.student, PeftModel):
            self.student.unload()
        self.student = None

    def undo(self) -> None:
        """Make the model the stock model again, after an error."""
        if self.merged:  # the weights have changed, and the conversion is complete
            return
        if self.student is not None:
            self.restore(self.initial)
            if isinstance(self.student, PeftModel):
                self.student.unload()
        if (installation := installation_of(model_root(self.model))) is not None:
            installation.remove(self.model)


class _Check(TrainerCallback):
    """Measures the loss a few times during a training, and stops the training when the target is reached."""

    def __init__(self, work: _Work, target: float | None) -> None:
        self.work, self.target = work, target

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measure at each quarter of the steps."""
        every = max(1, state.max_steps // CHECKS)
        if self.target is None or state.global_step % every or state.global_step >= state.max_steps:
            return
        if self.work.lost().share <= self.target:
            control.should_training_stop = True
            control.should_save = False  # a run that goes on from this very step would not stop here


def _fit(work: _Work) -> None:
    """Fit the swap as the plan says, or by the way that loses least: none, scaled values, a gain or a map per head."""
    start = time.perf_counter()
    wanted = work.plan.calibrate
    count = _calibration_rows(work.train) if wanted is None else wanted.rows
    rows = work.train.some(range(min(len(work.train), count)))
    batches = list(rows.batches(1 if work.low_memory else 8))
    if (known := work.journal.recall("fit")) is not None:
        if known["fit"] != NO_FIT:
            _calibrate(work, batches, known["fit"])
        work.steps.append(Step.from_dict(known["step"]))
        return
    if wanted is not None:
        chosen = wanted.fit
        _calibrate(work, batches, chosen)
        lost = work.lost()
    else:
        chosen, lost = _best_fit(work, batches)
    step = Step(name=f"fit: {chosen}", layers=work.layers, lost=lost, seconds=time.perf_counter() - start)
    work.steps.append(step)
    work.journal.record("fit", {"fit": chosen, "step": asdict(step)})


def _best_fit(work: _Work, batches: Sequence[Batch]) -> tuple[str, Lost]:
    """Fit the swap by the way that loses least. Returns the way and its loss."""
    swaps = [swap for layer in work.installation.layers() for swap in layer.copies]
    chosen = NO_FIT
    best = work.steps[-1].lost
    fitted = [_fitted(swap) for swap in swaps]
    for fit in (SCALED, *FITS) if any(swap.projects for swap in swaps) else FITS:
        _calibrate(work, batches, fit)
        lost = work.lost()
        if lost.cost < best.cost:
            chosen = fit
            best = lost
            fitted = [_fitted(swap) for swap in swaps]
    for swap, values in zip(swaps, fitted, strict=True):
        for name, value in values.items():
            setattr(swap, name, value)
    work.installation.refresh()
    return chosen, best


def _calibrate(work: _Work, batches: Sequence[Batch], fit: str) -> None:
    if fit == SCALED:
        scale_values(work.model, batches, progress=work.progress)
        return
    how = work.plan.calibrate or Calibrate()
    scaled = any(layer.swap.value_scale is not None for layer in work.installation.layers())
    calibrate(
        work.model,
        batches,
        fit=fit,
        source=how.source,
        neutral=how.neutral_start,
        scale=not scaled,  # the same batches would give the same scales again
        progress=work.progress,
    )


def _fitted(swap: Swap) -> dict[str, Any]:
    """What a calibration gave a swap."""
    return {
        "calibration": swap.calibration,
        "neutral": swap.neutral,
        "head_order": swap.head_order,
        "value_scale": swap.value_scale,
    }


def _groups(
    work: _Work, auto: bool, max_loss: float | None, keep: float
) -> tuple[list[list[int]], Sensitivity | None, bool]:
    """The layers in groups, in their order; what each layer alone costs; and whether the budget chooses among them."""
    layers = list(work.layers)
    enough = max_loss is not None and work.steps[-1].lost.share <= max_loss
    choosing = auto and max_loss is not None and not enough
    if not keep and not choosing:
        return [layers], None, choosing
    if (known := work.journal.recall("sensitivity")) is not None:
        sensitivity = Sensitivity.from_dict(known)
    else:
        part = work.held.part(max(FEWEST_HELD // 2, len(work.held.kept) // 4))  # there is a pass per layer
        sensitivity = layer_sensitivity(work.model, part, progress=work.progress)
        work.journal.record("sensitivity", sensitivity.to_dict())
    order = list(sensitivity.order)
    order = order[: len(order) - round(keep * len(order))] or order[:1]
    if not choosing:
        return [sorted(order)], sensitivity, choosing
    count = min(GROUPS, len(order))
    cuts = [round(place * len(order) / count) for place in range(count + 1)]
    return [order[first:last] for first, last in itertools.pairwise(cuts)], sensitivity, choosing


def _convert_groups(
    work: _Work, groups: Sequence[Sequence[int]], max_loss: float | None, choosing: bool
) -> dict[int, str]:
    """Convert group after group. Returns why a layer kept its own attention, by the layer's number."""
    everything = list(work.layers)
    kept = {index: "its swap costs most" for index in everything if not any(index in group for group in groups)}
    set_strength(work.model, 0.0)
    for number, group in enumerate(groups):
        before = work.trained() if work.student is not None else None
        set_strength(work.model, 1.0, layers=group)
        known = len(group) == len(everything)  # these layers together have been measured already
        step = work.steps[-1] if known else work.note(f"group {number + 1} swapped" if choosing else "layers chosen")
        untrained = step
        stages = itertools.chain(work.plan.distil, itertools.repeat(work.plan.last))
        for part, stage in enumerate(stages, 1):
            if work.exhausted or (max_loss is not None and step.lost.share <= max_loss):
                break
            budget = work.left  # in a later part of the last stage, all that other groups would have had
            if part == len(work.plan.distil):
                budget = work.left // (len(groups) - number)
            elif part < len(work.plan.distil):
                budget = stage.tokens or work.left
            what = "align" if stage.aligns else "distil"
            name = f"{what} {number + 1}.{part}" if choosing else f"{what} {part}"
            step = work.teach(stage, max(1, budget), max_loss, name)
        if choosing and max_loss is not None and step.lost.share > max_loss:
            _take_back(work, group, before)
            for later in groups[number:]:
                kept |= dict.fromkeys(later, "the loss would be above the budget")
            break
        bound = max(ROUNDING, DIVERGED * untrained.lost.cost)
        if not choosing and step is not untrained and not step.lost.cost <= bound:
            _restore(work, None)
            work.leave_adapters()
            work.note(UNDONE)
    work.finish()
    carries = any(layer.swap.carries for layer in work.installation.layers())
    if kept and not (carries and work.layers):  # else the swaps that stay at strength 0 pass their scores on
        unpatch_model(work.model, layers=sorted(kept))
    return kept


def _take_back(work: _Work, group: Sequence[int], before: dict[str, Tensor] | None) -> None:
    """Undo the last group: its layers run their own attention again, with the weights from before."""
    set_strength(work.model, 0.0, layers=group)
    if work.student is not None:
        _restore(work, before)
    work.note("last group taken back")


def _restore(work: _Work, before: dict[str, Tensor] | None) -> None:
    """Give the weights the values of before; None are those from before all training."""
    work.restore(work.initial if before is None else before)
    if before is None:
        work.changed = False
        note_retrained(work.installation, False)


def _split(root: PreTrainedModel, data: Any, eval_data: Any, processor: Any, length: int) -> tuple[Rows, Rows]:
    """The training rows and the held-out rows."""
    rows = as_rows(root, data, processor, length=length)
    if eval_data is not None:
        return rows, as_rows(root, eval_data, processor, length=length)
    enough = round(HELD_TOKENS / rows.length) if rows.length else HELD_ROWS
    count = max(FEWEST_HELD, min(enough, len(rows) // 20))
    if len(rows) < 2 * count:
        count = len(rows) // 2
    if not count:
        raise ValueError("a single row cannot be both trained and measured on; bring more data.")
    shuffled = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    return rows.some(sorted(shuffled[count:])), rows.some(sorted(shuffled[:count]))


def _try_longest(root: PreTrainedModel, rows: Rows) -> None:
    """Run the stock model on the longest of some rows.

    Raises:
        ValueError: the model cannot read the row.
    """
    batch = rows.collate([rows.longest()])
    size = batch["input_ids"].shape[-1] if "input_ids" in batch else 0
    positions = getattr(root.config, "max_position_embeddings", None)
    try:
        with evaluating(root):
            forward(root, without_labels(batch))
    except torch.OutOfMemoryError:
        raise
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        if isinstance(positions, int) and size > positions:
            raise ValueError(
                f"a row has {size} tokens, and the model has {positions} positions; take length={positions} or less."
            ) from error
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{type(root).__name__} cannot read a row with {', '.join(sorted(batch))}: {reason}. Rows that are ready "
            "must hold every input that the model needs, such as decoder_input_ids."
        ) from error


def _ends(rows: Rows) -> list[Tensor]:
    """The tensors of the first and the last row."""
    made = [rows.collate([dict(rows.rows[place])]) for place in (0, len(rows) - 1)]
    return [value for batch in made for value in batch.values() if isinstance(value, Tensor)]


def _calibration_rows(rows: Rows) -> int:
    """Some 16,000 tokens, or 256 rows of another kind."""
    return max(8, round(16_384 / rows.length)) if rows.unit == TOKENS else 256


def _rows_per_step(distil: Distil, rows: Rows) -> int:
    """The rows of a training step."""
    return distil.batch or max(1, round(FEW_TOKENS / (rows.length or FEW_TOKENS)))
