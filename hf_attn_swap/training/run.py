"""One run of one seed: load, swap, convert, fine-tune, measure. Its outcome is compared with others row by row.

A run that is killed at any step and started again gives the same weights.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    SchedulerType,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from .. import patch_model
from ..conversion.config import ConvertConfig
from ..conversion.distill import last_whole_checkpoint, without_secrets
from ..conversion.journal import Journal
from ..conversion.rows import Collator, ready_rows
from ..conversion.run import Run
from ..conversion.trainable import part_of
from ..layer.registry import canonical_name
from ..patch import unpatch_model
from ..publish.checkpoint import damage_named
from ..publish.results import hardware, read, versions
from ..text.bar import silent
from ..text.typed import parse_layers
from ..writing import claimed, saved_whole, told_where
from .arguments import CONTROL, DTYPES, ConversionArguments, ModelArguments
from .metrics import OUTLIERS, scores
from .penalty import PenalizedTrainer
from .soft_labels import SoftLabelTrainer
from .stages import FineTune, run_stage

OUTCOME_FILE = "outcome.json"
CONVERTED, STAGE, TRAINED = "converted", "stage-", "model"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a recipe provides: data that are ready for the model, and the way to measure the model.

    Attributes:
        load: builds the stock model; called after the seed is set.
        train, test: rows that `collate` makes batches of.
        collate: rows to a batch.
        metrics: names; the first is the headline.
        predict: from a trained model's `Trainer` to predictions and references, a number per held-out row.
        settings: what the figures depend on besides model, conversion and training arguments.
        processor: tokenizer or image processor, saved with the model.
        mean_loss: the head's loss is a mean over rows whatever the number of processes and accumulation steps. (Trainer
            sees keyword arguments in such a head's signature and would scale the loss as if it had used them.)
        before: measure the swapped model before anything is fitted or trained, too.
        scratch: what the model of random weights is, in words for the card; empty for a pretrained one.
        figures: further figures of the trained model, by name.
        penalty: the arguments of `PenalizedTrainer`; empty for a training without a penalty.
        callbacks: functions that make a callback of the `Trainer` that fine-tunes, such as `OutlierCallback`.
    """

    load: Callable[[], PreTrainedModel]
    train: Dataset
    test: Dataset
    collate: Collator
    metrics: Sequence[str]
    predict: Callable[[Trainer, Dataset], tuple[Sequence[float], Sequence[float]]]
    settings: dict[str, Any]
    processor: Any = None
    mean_loss: bool = True
    before: bool = False
    scratch: str = ""
    figures: Callable[[Trainer, Dataset], dict[str, float]] | None = None
    penalty: Mapping[str, float] = field(default_factory=dict)
    callbacks: Sequence[Callable[[Trainer], TrainerCallback]] = ()


def run(
    task: Task, model: ModelArguments, conversion: ConversionArguments, training: TrainingArguments, seed: int
) -> Outcome:
    """Train and measure the model of one seed, or return the outcome of an earlier call.

    The control is softmax without a conversion, and is trained with the same arguments.

    Raises:
        ValueError: the folder holds a run with other settings, another process trains in it, or the conversion does not
            fit the model.
        OSError: the folder cannot be written.
    """
    folder = Path(training.output_dir or "runs") / model.run_name / f"seed-{seed}"
    settings = _settings(task, model, conversion, training)
    if (done := Outcome.find(folder, settings)) is not None:
        return done
    with claimed(folder, writes=training.process_index == 0), told_where(folder):
        done = Outcome.find(folder, settings)  # again: another process may have ended in the meantime
        return done or _run(task, model, conversion, training, seed, folder, settings)


def _run(
    task: Task,
    model: ModelArguments,
    conversion: ConversionArguments,
    training: TrainingArguments,
    seed: int,
    folder: Path,
    settings: dict[str, Any],
) -> Outcome:
    """Train and measure the model of one seed in a folder of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    # What is published is the finished run with its card: Trainer would push every checkpoint, the control's too.
    # And it writes its arguments beside the weights, so they have no secrets.
    args = without_secrets(replace(training, output_dir=str(folder), seed=seed, push_to_hub=False))
    tuned = Path(training.output_dir or "runs") / CONTROL / f"seed-{seed}" / TRAINED
    before, first, converted, sentences = _converted(task, model, conversion, args, settings, tuned)
    _freeze(converted, conversion.freeze)
    made: Any = PenalizedTrainer if task.penalty else SoftLabelTrainer
    trainer: Trainer = made(converted, args, task.collate, train_dataset=task.train, **task.penalty)
    trainer.model_accepts_loss_kwargs &= not task.mean_loss
    if silent():
        trainer.remove_callback(PrinterCallback)
    for make in task.callbacks:
        trainer.add_callback(make(trainer))
    if isinstance(conversion.plan[-1], FineTune) and (args.num_train_epochs or args.max_steps > 0):
        sentences.append(_budget(task, args))
        if task.penalty:
            weight, scale = task.penalty.values()
            sentences.append(f"The loss has a penalty on activations above {scale:g}, of weight {weight:g}.")
        trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder))
    # "group_by_length" would also shuffle the held-out rows, differently for each seed.
    trainer.args.train_sampling_strategy = "random"
    predictions, references = task.predict(trainer, task.test)
    measured = scores(task.metrics, predictions, references)
    measured |= task.figures(trainer, task.test) if task.figures is not None else {}
    outcome = Outcome(
        settings={key: str(value) for key, value in settings.items()},
        seed=seed,
        metrics={**measured, **{f"{name}_before": value for name, value in first.items()}},
        predictions=tuple(map(float, predictions)),
        references=tuple(map(float, references)),
        swap=json.dumps(converted.config.attn_swap),
        parameters_added=_count(converted) - before,
        conversion=tuple(sentences),
        steps=trainer.state.global_step,
        rows={"train": len(task.train), "test": len(task.test)},
        wall_seconds=time.perf_counter() - start,
        hardware=hardware(args),
        versions=versions(),
        outliers=tuple(
            tuple(entry[name] for name in ("step", *OUTLIERS))
            for entry in trainer.state.log_history
            if OUTLIERS[0] in entry
        ),
    )
    _keep(trainer, task, folder, outcome)
    return outcome


def _converted(
    task: Task,
    model: ModelArguments,
    conversion: ConversionArguments,
    args: TrainingArguments,
    settings: dict[str, Any],
    tuned: Path,
) -> tuple[int, dict[str, float], PreTrainedModel, list[str]]:
    """Swap and convert the model, or go on after the last stage that a killed run finished.

    Returns:
        The number of parameters of the stock model, the metrics of the swapped model before the conversion, the
        converted model, and one sentence per conversion step.
    """
    set_seed(args.seed)
    with damage_named(model.model_name_or_path):
        stock = task.load()
    before = _count(stock)
    sentences: list[str] = []
    stages = list(conversion.plan)
    if isinstance(stages[-1], FineTune):
        stages.pop()
    if stages and isinstance(stages[0], FineTune):
        stages.pop(0)
        stock = _tuned(stock, tuned)
        sentences.append("Started from the fine-tuned softmax control of the same seed; no labels are read after that.")
    layers = parse_layers(model.layers)
    patched = patch_model(stock, model.variant, layers=layers, **model.option_values)
    kept = f"on random weights: {task.scratch}" if task.scratch else "weights kept"
    precision = "" if model.dtype == DTYPES[0] else f", in {model.dtype}"
    sentences.append(f"Attention replaced by {model.variant}, {kept}{precision}.")
    first: dict[str, float] = {}
    if task.before:
        first = scores(task.metrics, *task.predict(Trainer(patched, args, data_collator=task.collate), task.test))
    folder = Path(args.output_dir or "runs")
    converting = Run(
        model=patched,
        config=ConvertConfig(variant=model.variant),
        rows=ready_rows(task.train, task.collate),
        args=args,
        folder=folder,
        journal=Journal(folder / CONVERTED, settings, writes=args.should_save),
    )
    for number, stage in enumerate(stages, 1):
        assert not isinstance(stage, FineTune), "labels are read before a conversion or after it"
        run_stage(converting, stage, number)
    return before, first, patched, sentences + converting.sentences


def _tuned(stock: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The fine-tuned control, without its swap."""
    if not folder.exists():
        raise ValueError(f"{folder} holds no fine-tuned control; run the variant softmax with this seed first.")
    return unpatch_model(type(stock).from_pretrained(folder, dtype=stock.dtype))


def _freeze(model: PreTrainedModel, parts: Sequence[str]) -> None:
    for part in parts:
        for module in part_of(model, part):
            module.requires_grad_(False)


def _keep(trainer: Trainer, task: Task, folder: Path, outcome: Outcome) -> None:
    """Save the trained model and its outcome, and remove the files that were only there to resume the run."""
    first = trainer.is_world_process_zero()
    with saved_whole(folder / TRAINED, writes=first) as unfinished:
        trainer.save_model(str(unfinished))
        if task.processor is not None and first:
            task.processor.save_pretrained(unfinished)
    if first:
        for path in (*folder.glob("checkpoint-*"), *folder.glob(f"{STAGE}*"), folder / CONVERTED):
            shutil.rmtree(path, ignore_errors=True)
        outcome.save(folder)
    trainer.accelerator.wait_for_everyone()  # the next run may start from this model


def _settings(
    task: Task, model: ModelArguments, conversion: ConversionArguments, training: TrainingArguments
) -> dict[str, Any]:
    own = {
        "variant": model.variant,
        "options": model.options,
        "layers": model.layers,
        "model": model.model_name_or_path,
    }
    if model.dtype != DTYPES[0]:
        own["dtype"] = model.dtype
    budget = {
        "epochs": training.num_train_epochs,
        "max_steps": training.max_steps,
        "batch": training.per_device_train_batch_size * training.gradient_accumulation_steps * training.world_size,
        "learning_rate": training.learning_rate,
        "warmup": training.warmup_steps,
        "weight_decay": training.weight_decay,
        "precision": _precision(training),
    }
    if training.lr_scheduler_type != SchedulerType.LINEAR:
        budget["scheduler"] = SchedulerType(training.lr_scheduler_type).value
    if training.lr_scheduler_kwargs:
        budget["scheduler_kwargs"] = training.lr_scheduler_kwargs
    if training.label_smoothing_factor:
        budget["label_smoothing"] = training.label_smoothing_factor
    converting: dict[str, Any] = {"freeze": conversion.freeze}
    if model.variant != CONTROL or conversion.steps:
        converting |= {"stages": conversion.plan}
    return {**own, **budget, **converting, **task.settings}


def _precision(training: TrainingArguments) -> str:
    if training.bf16:
        return "bf16"
    return "fp16" if training.fp16 else "fp32"


def _budget(task: Task, args: TrainingArguments) -> str:
    length = f"{args.max_steps:,} steps" if args.max_steps > 0 else f"{args.num_train_epochs:g} epochs"
    return f"{'Trained' if task.scratch else 'Fine-tuned'} for {length} on {len(task.train):,} rows."


def _count(model: nn.Module) -> int:
    return sum(math.prod(parameter.shape) for parameter in model.parameters())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One trained and measured model.

    Args:
        settings: every setting on which the metrics depend, as text. A folder holds runs of the same settings only.
        seed: the seed of the run.
        metrics: values by name.
        predictions, references: one number per held-out row: the predicted and the true class, or a loss and zero.
        swap: `config.attn_swap` of the model, as JSON.
        parameters_added: the number of parameters that the swap added.
        conversion: how the model was made, one sentence per step.
        steps: number of fine-tuning steps.
        rows: number of rows by split.
        wall_seconds: seconds of the whole run.
        hardware, versions: the machine, and the versions of packages.
        outliers: step, kurtosis and largest activation, where an `OutlierCallback` logged them.
    """

    settings: dict[str, str]
    seed: int
    metrics: dict[str, float]
    predictions: tuple[float, ...]
    references: tuple[float, ...]
    swap: str
    parameters_added: int
    conversion: tuple[str, ...]
    steps: int
    rows: dict[str, int]
    wall_seconds: float
    hardware: str
    versions: dict[str, str]
    outliers: tuple[tuple[float, ...], ...] = ()

    def save(self, folder: Path) -> None:
        """Write the outcome into a folder. An interrupted write leaves no file of this name."""
        unfinished = folder / f"{OUTCOME_FILE}.part"
        unfinished.write_text(json.dumps(asdict(self), allow_nan=False) + "\n", encoding="utf-8")
        unfinished.replace(folder / OUTCOME_FILE)

    @classmethod
    def find(cls, folder: Path, settings: dict[str, Any]) -> Outcome | None:
        """The outcome in a folder, or None if the run has not ended. The name of a variant may be an alias.

        Raises:
            ValueError: the folder holds a run of other settings.
        """
        path = folder / OUTCOME_FILE
        if not path.exists():
            return None
        outcome: Outcome = read(cls, json.loads(path.read_text(encoding="utf-8")))
        wanted = {key: str(value) for key, value in settings.items()}
        stored = dict(outcome.settings)
        if "variant" in stored:
            stored["variant"] = canonical_name(stored["variant"])
        for key in sorted(wanted.keys() | stored.keys()):
            if wanted.get(key) != stored.get(key):
                raise ValueError(
                    f"{folder} holds a run with {key} = {stored.get(key)}, not {wanted.get(key)}; choose another "
                    "--output_dir."
                )
        return outcome
