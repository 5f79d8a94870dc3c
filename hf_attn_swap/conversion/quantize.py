"""Rounds a model to 8-bit integers with little loss by one call; each step is measured on held-out rows.

1. stock:     what the stock model loses in 8 bits
2. convert:   with a variant, the steps of `convert`; without one, a sink if less is lost in 8 bits with it
3. smooth:    channels of like sizes, if less is lost in 8 bits with them; it is the same function
4. qat:       while tokens are left, the model in full precision teaches the rounded model
5. integers:  weights in 8-bit integers, and a static range for each input, or a range per token
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel, TrainingArguments

from ..layer.smoothing import Smoothing
from ..measuring.batches import Batch, evaluating
from ..measuring.lost import Lost
from ..patch import unpatch_model
from ..quantization.linear import integers as kernel_dtype
from ..quantization.machine import machine_w8a8
from ..quantization.points import Range
from ..quantization.static import input_ranges, int8_dynamic, int8_static, per_token
from ..quantization.straight_through import straight_through
from ..variants.softmax import Softmax
from ..wiring.install import model_root
from .config import DYNAMIC, ConvertConfig, Distil
from .convert import convert_steps, started
from .convert import swap as put_variant
from .distill import exhausted, train
from .report import ConversionReport
from .rows import TOKENS
from .run import Run
from .sink import absorb as absorb_if_better
from .smooth import smooth as smooth_channels
from .trainable import VECTORS, part_of, vectors_of
from .trainer import Teacher

Ranges = Mapping[str, Range | None]  # of the inputs of the matrices, by path; None is a range per token

RANGE_TOKENS = 8192  # tokens that the ranges are fitted on,
RANGE_ROWS = 64  # or rows of other data
AT_ONCE = 4  # rows of a batch
QAT = "distilled in 8 bits"
LEARNING_RATE = 1e-3  # of the training with rounding, measured on SmolLM2
TRAINED = (VECTORS, "swap")


def quantize(
    model: nn.Module,
    data: Any,
    processor: Any = None,
    *,
    variant: str | None = None,
    eval_data: Any = None,
    eval_tokens: int | None = None,
    tokens: int = 0,
    max_loss: float | None = None,
    absorb: bool = True,
    stages: Sequence[Distil] = (),
    low_memory: bool = False,
    length: int = 512,
    inputs: Literal["static", "dynamic"] = "static",
    output_dir: str | Path | None = None,
    args: TrainingArguments | None = None,
    progress: bool = True,
    **options: Any,
) -> ConversionReport:
    """Round a model to 8-bit integers, in place, and report what was lost.

        report = quantize(model, texts, processor=tokenizer)
        model.save_pretrained("rounded")

    Args:
        model: a stock model in floating point, as in `convert`.
        data: to measure, to fit and to train on, as in `convert`.
        variant: convert the model to this variant first, in all layers (or as many as `max_loss` allows).
        tokens: the budget of the trainings. Half of it is for the variant; the norms, the biases and the sink of a
            float32 model train with the rest as the model will run, with rounding. 0 trains nothing.
        absorb: in a causal language model, try the keys and values of one token as a `sink`, and keep them if less is
            lost in 8 bits. It needs the tokenizer.
        processor: as in `convert`, as are all further arguments.
        eval_data: held-out data, to measure on.
        eval_tokens: how much of it is read.
        max_loss: the largest loss.
        stages: how the variant is trained.
        low_memory: trade time for memory.
        length: the number of tokens of a row.
        inputs: "static" rounds the inputs of each matrix to one range, which is fitted; "dynamic" to a range per token,
            which is found as the model runs.
        output_dir: a folder from which the same call goes on.
        args: more arguments of the training.
        progress: show progress bars.
        options: the options of the variant.

    Returns:
        The loss after every step. The model is in 8-bit integers, as `int8_static` or `int8_dynamic` makes it;
        `save_pretrained` saves it. It is the stock model if no layer could run the variant within the budget.

    Raises:
        ValueError: as `convert`; or the model has no matrices that 8-bit integers can hold.
        OSError: the folder cannot be written.
    """
    config = ConvertConfig(
        variant=variant or Softmax.name,
        options=options,
        processor=processor,
        tokens=tokens,
        eval_tokens=eval_tokens,
        max_loss=max_loss,
        absorb=absorb,
        stages=stages,
        low_memory=low_memory,
        length=length,
        inputs=inputs,
        quantized=True,
    )
    with started(model, config, data, eval_data, None, output_dir, args, progress) as run:
        _measure_in_8_bits(run, "stock model in 8 bits")
        layers_alone = heads_alone = None
        if config.variant == Softmax.name:
            put_variant(run, measured=False)
            absorb_if_better(run, lost_in_8_bits, before=run.record[-1].lost)
        else:
            selection, heads_alone = convert_steps(run, measure=lost_in_8_bits)
            layers_alone = selection.sensitivity
            if run.swaps:
                _measure_in_8_bits(run, "in 8 bits")
        if run.swaps:
            run.apply("in 8 bits, smoothed", partial(_smooth, run, run.record[-1].lost), again=True)
            ranges = qat(run)
            integers(run, ranges)
    return run.report(layers_alone, heads_alone)


def lost_in_8_bits(run: Run) -> Lost:
    """What the model loses on the held-out rows, as it is, in 8 bits as machines run it."""
    dynamic = run.config.inputs == DYNAMIC
    with evaluating(run.model), machine_w8a8(run.model, _batches(run), dynamic=dynamic):
        return run.lost()


def _measure_in_8_bits(run: Run, name: str) -> None:
    run.apply(name, lambda: run.measured(name, lost_in_8_bits(run)))


def _batches(run: Run) -> list[Batch]:
    """Some training rows, spread evenly over all of them, in batches."""
    count = round(RANGE_TOKENS / run.rows.length) if run.rows.unit == TOKENS else RANGE_ROWS
    count = min(len(run.rows), max(2 * AT_ONCE, count))
    chosen = [place * len(run.rows) // count for place in range(count)]
    return list(run.rows.some(chosen).batches(1 if run.config.low_memory else AT_ONCE))


def _smooth(run: Run, before: Lost) -> None:
    """Smooth the channels, if less is lost in 8 bits with them."""
    run.keep(vectors_of(run.student))  # `qat` trains them, and their first values are those without the scales
    undo = partial(run.installation.drop, Smoothing.name)
    with run.trial("in 8 bits, smoothed", before, undo) as trial:
        try:
            smoothed = smooth_channels(run.model, _batches(run), progress=run.progress)
        except ValueError as problem:
            run.say(f"No channel was smoothed: {problem}")
            return
        better = trial.keep_if_better(lost_in_8_bits(run))
        run.say(str(smoothed) if better else "Smoothed channels lost more in 8 bits, so the channels are as they were.")


def qat(run: Run) -> Ranges | None:
    """Train with rounding, unless the loss in 8 bits is within the budget, and keep what loses less in 8 bits.

    The student computes with 8-bit inputs and weights, as it will run. What trains are the parameters of one dimension
    (norms, biases), and those of the variant, such as the pair of a sink: on SmolLM2 they bring about as much as all
    weights, and take no memory. docs/mathematics.md, section Quantisation to 8 bits.

    Returns:
        The ranges of the training, which stay those of the model; None if nothing was learnt. In half precision nothing
        trains: small steps would be lost.
    """
    if model_root(run.model).dtype != torch.float32 or exhausted(run, run.budget.left) or run.within:
        return None
    return run.apply(QAT, partial(_qat, run, run.record[-1].lost))


def _qat(run: Run, before: Lost) -> Ranges | None:
    run.budget.reserved = 0
    ranges = _ranges(run)
    stage = dataclasses.replace(run.config.distil, rank=None, trainable=TRAINED, learning_rate=LEARNING_RATE)
    run.original = Teacher(run.student, run.teacher or _copied(model_root(run.model)))
    with run.trial(QAT, before) as trial:
        try:
            with straight_through(run.model, ranges):
                train(run, stage, run.budget.left, QAT)
                better = trial.keep_if_better(run.lost())
        finally:
            run.original = None
    return ranges if better else None


def _copied(root: PreTrainedModel) -> PreTrainedModel:
    """The model before the rounding, with its swaps, which is nearer than the stock model. It shares what stays."""
    trained = {id(parameter) for parameter in vectors_of(root)}
    trained |= {id(parameter) for module in part_of(root, "swap") for parameter in module.parameters()}
    return copy.deepcopy(
        root, {id(parameter): parameter for parameter in root.parameters() if id(parameter) not in trained}
    )


def _ranges(run: Run) -> Ranges:
    """The ranges of the model's inputs, as they are fitted; or a range per token."""
    if run.config.inputs == DYNAMIC:
        return per_token(model_root(run.model))
    with evaluating(run.model):
        return input_ranges(run.model, _batches(run))


def integers(run: Run, ranges: Ranges | None) -> None:
    """Put integers instead of the weights. From here on, there is no way back.

    Where no layer runs anything but its own attention, the swaps leave, so that the model loads without this package.
    """
    run.apply("8-bit integers", partial(_round, run, ranges), again=True)
    run.apply("swaps that change nothing", partial(_leave_stock, run), measured=False, again=True)


def _round(run: Run, ranges: Ranges | None) -> None:
    if ranges is None:
        ranges = _ranges(run)
    run.final = True
    fixed = {path: ends for path, ends in ranges.items() if ends is not None}
    if fixed:
        int8_static(run.model, fixed)
    else:
        int8_dynamic(run.model)
    if model_root(run.model).device.type == "cpu" and kernel_dtype() is None:
        run.say(
            "This processor has no fast product of 8-bit integers (VNNI), so the same numbers are computed in floating "
            "point: here the model is smaller, and not faster."
        )


def _leave_stock(run: Run) -> None:
    """Take out swaps that are stock attention. The scales of a smoothing stay in the weights."""
    swaps = [swap for copies in run.swaps.values() for swap in copies]
    if any(swap.names != (Softmax.name,) or set(swap.fitted) - {Smoothing.name} for swap in swaps):
        return
    for swap in swaps:
        swap.drop(Smoothing.name)
    unpatch_model(run.model)
    run.say("No attention is swapped, so the model is saved as one of transformers, which loads without this package.")
