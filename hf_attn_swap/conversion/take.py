"""Runs one stage of a conversion on a recipe's data."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

from ..layer.swap import Swap
from ..patch import need_installation
from ..variants.base import Variant
from .calibrate import calibrate
from .distillation import DistillationTrainer
from .stages import Align, Calibrate, Distil, Stage
from .transfer import AttentionTransferTrainer

Collator = Callable[[list[dict[str, Any]]], dict[str, Any]]
SAMPLE = 256  # rows whose length tells how many rows a budget of tokens is


def take(
    stage: Stage,
    model: PreTrainedModel,
    rows: Dataset,
    collate: Collator,
    args: TrainingArguments,
    teacher: PreTrainedModel | None = None,
) -> tuple[PreTrainedModel, str]:
    """Run one stage.

    Args:
        stage: calibrate, align or distil.
        model: the patched model.
        rows: the training rows; labels are not read.
        collate: rows to a batch.
        args: the recipe's arguments, with the folder of this stage.
        teacher: for distil, the original model if an earlier stage has changed the weights; None otherwise.

    Returns:
        The model, and one sentence that says what was done.
    """
    if isinstance(stage, Calibrate):
        return model, _calibrate(stage, model, rows, collate, args)
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    if isinstance(stage, Align):
        sentence = _align(stage, model, rows, collate, args)
    else:
        assert isinstance(stage, Distil)
        sentence = _distil(stage, model, rows, collate, args, teacher)
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    return model, sentence


def last_whole_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint, or None. Incomplete checkpoints of a killed run are removed."""
    found = sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)
    for path in found:
        try:  # the Trainer writes this file last
            json.loads((path / "trainer_state.json").read_text(encoding="utf-8"))
        except (OSError, json.JSONDecodeError):
            shutil.rmtree(path)
        else:
            return str(path)
    return None


def _calibrate(
    stage: Calibrate, model: PreTrainedModel, rows: Dataset, collate: Collator, args: TrainingArguments
) -> str:
    """Calibrate on the first rows, sorted by length so that there is little padding."""
    first = [_inputs(row) for row in rows.select(range(min(stage.rows, len(rows))))]
    first.sort(key=lambda row: len(row.get("input_ids", ())))
    size = args.train_batch_size
    batches = [collate(first[start : start + size]) for start in range(0, len(first), size)]
    report = calibrate(model, batches, fit=stage.fit, source=stage.source, neutral=stage.neutral_start)
    return f"Calibrated: {report.summary()}{_starts(model)}"


def _starts(model: PreTrainedModel) -> str:
    """What a calibration chose before the fit, in words: the scale of the skip, and the order of the heads."""
    swaps = [layer.swap for layer in need_installation(model).layers()]
    words = ""
    if neutral := [swap for swap in swaps if swap.neutral is not None]:
        words += f" The skip of {len(neutral)} layers starts at 2^-{neutral[0].neutral} of the input (neutral start)."
    if matched := sum(swap.head_order is not None for swap in swaps):
        words += f" The heads of {matched} layers meet the carried scores that are most like their own."
    if scaled := sum(swap.value_scale is not None for swap in swaps):
        words += f" The values of {scaled} layers are scaled, so that the projection removes little."
    return words


def _align(stage: Align, model: PreTrainedModel, rows: Dataset, collate: Collator, args: TrainingArguments) -> str:
    chosen, own, budget = _budget(stage, rows, args)
    trainer = AttentionTransferTrainer(
        model, own, trainable=stage.trainable, train_dataset=chosen, data_collator=collate
    )
    _train(trainer)
    return f"Attention transfer without labels: {budget} ({', '.join(stage.trainable)})."


def _distil(
    stage: Distil,
    model: PreTrainedModel,
    rows: Dataset,
    collate: Collator,
    args: TrainingArguments,
    teacher: PreTrainedModel | None,
) -> str:
    chosen, own, budget = _budget(stage, rows, args)
    student: nn.Module = model
    if stage.rank is not None:
        student = with_adapters(model, stage.rank)
    trainer = DistillationTrainer(
        student,
        own,
        teacher=teacher,
        losses=stage.losses,
        trainable=stage.trainable if stage.rank is None else None,
        train_dataset=chosen,
        data_collator=collate,
        callbacks=None if stage.schedule is None else [stage.schedule],
    )
    _train(trainer)
    merged = trainer.merged()
    assert merged is model, "PEFT gives back the model that it was put around"
    what = f"LoRA of rank {stage.rank}, merged" if stage.rank is not None else f"{', '.join(stage.trainable)} trained"
    terms = {"logits": stage.logits, "hidden states": stage.hidden, "swapped layers": stage.layers}
    used = " + ".join(f"{weight:g} x {name}" for name, weight in terms.items() if weight)
    return (
        f"Distilled without labels from the model before the swap: {budget}, {what}, loss {used}, "
        f"learning rate {stage.learning_rate:g}{_rise(stage)}."
    )


def _rise(stage: Distil) -> str:
    """How the strength rises during a distillation, in words."""
    if not stage.schedule_share:
        return ""
    how = {
        "together": "in all layers",
        "up": "layer after layer from the first",
        "down": "layer after layer from the last",
    }
    return f", the strength rising over {stage.schedule_share:.0%} of the steps {how[stage.schedule_order]}"


def with_adapters(model: PreTrainedModel, rank: int) -> nn.Module:
    """Put LoRA adapters on all matrices but the head, and let the variant's own parameters train as they are."""
    inside = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Swap))
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D)) and module is not head and not name.startswith(inside or ("\0",))
    ]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=names)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")  # PEFT sees by itself how Conv1D lies
        wrapped: nn.Module = get_peft_model(model, config)
    for module in wrapped.modules():
        if isinstance(module, Variant):
            module.requires_grad_(True)
    return wrapped


def _budget(stage: Align | Distil, rows: Dataset, args: TrainingArguments) -> tuple[Dataset, TrainingArguments, str]:
    """The rows and the arguments of a stage, and its budget in words."""
    epochs, words = stage.epochs, f"{stage.epochs:g} epochs on {len(rows):,} training rows"
    if stage.tokens is not None:
        some = [len(rows[index].get("input_ids", ())) for index in range(min(SAMPLE, len(rows)))]
        each = sum(some) / len(some)
        if not each:
            raise ValueError(f"{stage.name}: tokens counts tokens of text; give epochs for other data.")
        wanted = max(1, round(stage.tokens / each))
        epochs = 1.0 if wanted <= len(rows) else wanted / len(rows)
        rows = rows.select(range(min(wanted, len(rows))))
        words = f"{stage.tokens:,} tokens"
    own = replace(
        args,
        num_train_epochs=epochs,
        max_steps=-1,
        learning_rate=stage.learning_rate,
        per_device_train_batch_size=getattr(stage, "batch", None) or args.per_device_train_batch_size,
    )
    return rows, own, words


def _train(trainer: Trainer) -> None:
    folder = Path(trainer.args.output_dir or ".")
    trainer.train(resume_from_checkpoint=last_whole_checkpoint(folder))


def _inputs(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ("labels", "label")}
