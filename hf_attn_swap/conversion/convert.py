"""Converts a model to another attention by one call: swap, absorb a sink, fit, choose layers, distil; each is measured.

The steps, each measured on held-out rows:

    1. swap:           the variant in all layers that may be converted
    2. absorb:         in a causal language model, the keys and values of one token as a sink, if less is lost with it
    3. select_heads:   with heads="auto", the key/value heads that keep all keys, by what they cost alone and together
    4. fit_heads:      no fit, a gain or a map per head, whichever loses least (or as `fit` says)
    5. select_layers:  with a budget or a share to keep, what each layer alone costs decides about the order
    6. distil:         the original model teaches the swapped model, group of layers by group of layers
    7. finish:         adapters merged into the weights, no swap in layers that keep their own attention

With a budget, the cheapest layers come first. A group whose loss comes within the budget is followed by the next group.
If the tokens are used up before, the last group is taken back. Without a choice of layers, the weights with
which the model lost least are the result: a training that made it worse is taken back. Labels are not read by any step.
The method is this package's own; docs/mathematics.md, section Conversion.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from ..measuring.held_out import HeldOut
from ..measuring.lm_head import logits_of
from ..measuring.lost import Lost, predicts_next
from ..measuring.recall import Passages
from ..patch import choose_layers, patch_model, swappable, unpatch_model
from ..quantization.static import check_linears
from ..text.bar import line
from ..variants.softmax import Softmax
from ..wiring.install import Installation, Record, installation_of, model_root, searched_once
from ..writing import claimed, told_where
from .calibrate import fit_heads
from .config import ConvertConfig, Distil
from .distill import distil
from .distributed import broadcast_from_rank0, refuse_sharding
from .half_precision import tell_if_slow
from .journal import Journal, fingerprint
from .report import ConversionReport, Sensitivity
from .rows import Rows, split, try_longest
from .run import Budget, Run, rows_per_step
from .sensitivity import LayerSelection, passages_beyond, reach_of, select_heads, select_layers
from .sink import absorb
from .trainable import EVERYTHING, preserve_training_state, refuse_adapters
from .trainer import check_teacher


def convert(
    model: nn.Module,
    variant: str,
    data: Any,
    processor: Any = None,
    *,
    eval_data: Any = None,
    eval_tokens: int | None = None,
    tokens: int = 300_000,
    max_loss: float | None = None,
    min_recall: float | None = None,
    recall_distance: int | None = None,
    layers: Literal["auto"] | int | Iterable[int] = "auto",
    modules: str | None = None,
    heads: Literal["auto"] | None = None,
    keep: float = 0.0,
    fit: Literal["auto", "gain", "map"] | None = "auto",
    absorb: bool = True,
    stages: Sequence[Distil] = (),
    low_memory: bool = False,
    teacher: PreTrainedModel | None = None,
    length: int = 256,
    target: Literal["engine"] | None = None,
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
        model: a stock model, as from_pretrained returns it. What `torch.compile` made of it shares its weights; the
            conversion runs the model inside, because hooks that measure would compile it again and again.
        variant: the name of the variant, or a composition such as "outeffhop+gated".
        data: texts, pairs of texts, images or rows that are ready, as a sequence or as a stream that may have no end,
            such as an `IterableDataset`; see `as_rows`. No more is read than the budget needs. Labels are not read.
        processor: the tokenizer or image processor.
        eval_data: held-out data of the same kind, to measure on. None takes a twentieth of `data` (at least 8 rows,
            and at most some 8,000 tokens or patches), which the conversion then does not see. If held-out rows have
            labels, a classifier's accuracy is the measure, or the rank correlation of a regression.
        eval_tokens: how much of `eval_data` is measured on at most: tokens of text, patches of images, or rows of other
            data. None is 32,768 tokens or patches, or 256 rows.
        tokens: the budget of the distillation, in tokens of text; in patches, for images; in rows, for other data. 0
            trains nothing, as does a budget below one step.
        max_loss: the largest loss, as a share (0.02 is 2 %) of what `Lost.degradation` names for this kind of model,
            such as perplexity. The conversion stops as soon as the loss is within this budget.
        min_recall: in a causal language model, the smallest recall as a share of the stock model's (0.97): what a
            passage of 96 tokens gains when it is read again after 200 tokens, or after as many as a wider window has.
            It is a budget as `max_loss` is; with both, both must be met. Recall is measured too, without a budget,
            where a variant hides keys (a window, or linear attention).
        recall_distance: in a causal language model, measure recall after so many tokens instead. Layers and heads are
            then chosen for texts of this length: heads that find a passage after 200 tokens may not find it after
            2,000. It needs held-out rows, and positions, for 192 tokens more, and the measurements take longer.
        layers: the layers to convert: numbers, or "auto" for all; with `max_loss` or `min_recall`, "auto" means as
            many as the budget allows, the cheapest first.
        modules: convert only inside these modules, as in `patch_model`: "language_model" leaves the vision tower of a
            vision-language model as it is. `layers` then counts inside these modules.
        heads: "auto" chooses key/value heads in place of layers, for a variant that can leave heads as they are
            (`window`, by its option `full_heads`): `keep` is then the share of the heads that keep all keys.
        keep: the share of layers that keep their own attention: the costliest layers. With `heads`, the share of
            key/value heads.
        fit: a "gain" or a "map" per head, by least squares (`calibrate`). "auto" takes one of them, scaled values or
            no fit, whichever loses least, and none if the swap alone is within the budget. None fits nothing.
        absorb: in a causal language model that is converted in all layers, try the keys and values of one token as a
            `sink` beside the variant, and keep them if less is lost. It needs the tokenizer (`processor`), and the
            report says what was found. See `absorb_sink`.
        stages: how to distil, one `Distil`; none chooses by the kind and size of the model.
        low_memory: trade time for memory: adapters instead of all weights, one row at a time, and activations that
            are computed again in the backward pass. The steps have the same number of rows.
        teacher: another model that gives the targets, and that losses are compared with; None is the model itself.
        length: the number of tokens of a row, when `data` are texts.
        target: "engine" converts to the form that `export` can write for vLLM and llama.cpp: a window in whole layers
            and without first tokens, with a `sink` of a learned score and value in their place.
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
        ValueError: the model is already converted or quantized, the data do not fit the model, an argument is out of
            range, the folder holds another conversion, or another process writes into it. After an error the model is
            the stock model as it was; after an interruption of the last measurement, when the adapters are merged, it
            is the converted model.
        OSError: the folder cannot be written.
    """
    config = ConvertConfig(
        variant=variant,
        options=options,
        processor=processor,
        tokens=tokens,
        eval_tokens=eval_tokens,
        max_loss=max_loss,
        min_recall=min_recall,
        recall_distance=recall_distance,
        layers=layers,
        modules=modules,
        heads=heads,
        keep=keep,
        fit=fit,
        absorb=absorb,
        stages=stages,
        low_memory=low_memory,
        length=length,
        target=target,
    )
    with started(model, config, data, eval_data, teacher, output_dir, args, progress) as run:
        selection, heads_alone = convert_steps(run)
    return run.report(selection.sensitivity, heads_alone)


def convert_steps(run: Run, measure: Callable[[Run], Lost] | None = None) -> tuple[LayerSelection, Sensitivity | None]:
    """All steps. A sink is chosen by `measure`, if it is given; see `absorb`."""
    swap(run)
    absorb(run, measure)
    heads = select_heads(run)
    fit_heads(run)
    layers = select_layers(run)
    distil(run, layers)
    finish(run)
    return layers, heads


def swap(run: Run, *, measured: bool = True) -> None:
    """Put the variant into all layers that may be converted."""
    config = run.config
    put = partial(patch_model, layers=config.layers, modules=config.modules, **config.options)
    run.apply("swap", partial(put, run.model, config.variant), measured=measured, again=True)


def finish(run: Run) -> None:
    """Leave the model as it will be used: adapters merged, and no swap in layers that keep their own attention."""
    if run.adapters is not None and run.layers and run.changed:
        run.apply("adapters merged", partial(_merge_adapters, run), again=True)
    run.apply("clear", partial(_clear, run), measured=False, again=True)


def _merge_adapters(run: Run) -> None:
    """Merge the adapters. From here on, there is no way back."""
    run.final = True
    run.leave_adapters(merged=True)


def _clear(run: Run) -> None:
    """Take off adapters that have learnt nothing, and the swaps that are not used.

    If the variant carries scores and runs in some layers, the other swaps stay at strength 0: they pass scores on.
    """
    run.leave_adapters(merged=False)
    carries = any(swap.carries for copies in run.swaps.values() for swap in copies)
    if run.kept and not (carries and run.layers):
        unpatch_model(run.model, layers=sorted(run.kept))


@contextlib.contextmanager
def started(
    model: nn.Module,
    config: ConvertConfig,
    data: Any,
    eval_data: Any = None,
    teacher: PreTrainedModel | None = None,
    output_dir: str | Path | None = None,
    args: TrainingArguments | None = None,
    progress: bool = True,
) -> Iterator[Run]:
    """Check the model and the data, and start a conversion: inside, the steps are done, and undone after an error.

    Raises:
        ValueError, OSError: as `convert`.
    """
    root = model_root(model)
    with contextlib.ExitStack() as inside:
        inside.enter_context(searched_once(root))
        folder = Path(inside.enter_context(tempfile.TemporaryDirectory())) if output_dir is None else Path(output_dir)
        args = args or TrainingArguments(output_dir=str(folder), report_to="none")
        check_model(model, config, teacher, args)
        if args.should_log:
            tell_if_slow(root)
        config = config.for_model(root)
        if installation_of(root) is not None:
            unpatch_model(root)
        for preserved in (root,) if teacher is None else (root, teacher):
            inside.enter_context(preserve_training_state(preserved))
        if output_dir is not None:
            inside.enter_context(claimed(folder, writes=args.should_save, inside=True))
            inside.enter_context(told_where(folder))
        rows, held_rows = split(
            root,
            data,
            eval_data,
            config.processor,
            config.length,
            tokens=config.tokens,
            eval_tokens=config.eval_tokens,
        )
        output = try_longest(root, rows)
        if config.distil.logits:
            logits_of(output)  # refuses a model without logits
        journal = _journal(None if output_dir is None else folder, root, teacher, config, rows, held_rows, args)
        passages, why_not = _passages(root, config, held_rows)
        if progress:
            line(f"{type(root).__name__}: {len(rows):,} rows to train on, {len(held_rows)} held out to measure on")
        run = Run(
            model=root,  # without what is around it: torch.compile, or a SentenceTransformer
            config=config,
            rows=rows,
            args=args,
            folder=folder,
            journal=journal,
            held=_measured_on(held_rows, teacher or root, config, passages, progress),
            held_rows=len(held_rows),
            teacher=teacher,
            budget=Budget(left=config.tokens, reserved=config.reserved),
            progress=progress,
        )
        if eval_data is not None and not held_rows.whole:
            run.say(
                f"The loss was measured on {len(held_rows):,} rows, a part of the held-out data; a larger eval_tokens "
                "takes more of them."
            )
        if why_not is not None:
            run.say(f"Recall was not measured: {why_not}")
        with run.restore_on_error():
            yield run


def check_model(
    model: nn.Module, config: ConvertConfig, teacher: PreTrainedModel | None, args: TrainingArguments
) -> None:
    """Refuse a model that cannot be converted as it is.

    Raises:
        ValueError: its attention is another already; it has adapters; its weights are rounded, or split over processes;
            it lacks the layers that are named; or the teacher has other outputs.
    """
    root = model_root(model)
    refuse_converted(model)
    refuse_adapters(model)
    refuse_sharding(args, root)
    refuse_rounded(root)
    if config.quantized:
        check_linears(root)
    if teacher is not None:
        check_teacher(root, teacher)
    choose_layers(swappable(installation_of(root) or Installation(root, Record())), config.layers, config.modules)


def _journal(
    folder: Path | None,
    root: PreTrainedModel,
    teacher: PreTrainedModel | None,
    config: ConvertConfig,
    rows: Rows,
    held: Rows,
    args: TrainingArguments,
) -> Journal:
    """The journal in a folder, which all processes read; of all that decides about the results.

    Raises:
        ValueError: the folder holds another conversion, or the processes do not see the same folder or weights.
    """
    weights = fingerprint(root.parameters())
    if broadcast_from_rank0(weights, args) != weights:
        raise ValueError("the processes have other weights than the first; each has to load the whole model.")
    settings = config.settings() | {
        "model": type(root).__name__,
        "weights": weights,
        "teacher": None if teacher is None else fingerprint(teacher.parameters()),
        "data": fingerprint(_ends(rows) + _ends(held)),
        "rows": (len(rows), len(held), rows.length),
        "bf16": args.bf16,
        "processes": args.world_size,
    }
    journal = Journal(folder, settings, writes=args.should_save)
    if broadcast_from_rank0(len(journal.entries), args) != len(journal.entries):
        raise ValueError(f"{folder} holds other files for the first process; name a folder that all processes share.")
    return journal


def refuse_converted(model: nn.Module) -> None:
    """Refuse a model with another attention than stock attention or the control `softmax`, which computes the same.

    Raises:
        ValueError: a layer has another attention, or its control was calibrated to another attention.
    """
    installation = installation_of(model_root(model))
    swaps = [] if installation is None else [swap for layer in installation.layers() for swap in layer.copies]
    for swap in swaps:
        if swap.names != (Softmax.name,) or swap.fitted:
            raise ValueError("the model is already converted; load the stock model, or call unpatch_model first.")


def refuse_rounded(root: PreTrainedModel) -> None:
    """Refuse weights that are rounded: the fit and the training change weights in floating point.

    Raises:
        ValueError: the model was loaded with a quantization (bitsandbytes, torchao, GPTQ and others), or has weights of
            a tensor type of its own, as torchao's `quantize_` leaves them.
    """
    rounded = getattr(root, "hf_quantizer", None) is not None or getattr(root.config, "quantization_config", None)
    if not rounded:
        rounded = any(type(p) is not nn.Parameter or not p.is_floating_point() for p in root.parameters())
    if rounded:
        raise ValueError(
            f"the weights of this {type(root).__name__} are rounded (quantized) already, and a conversion changes "
            "weights in floating point; load the model without quantization, convert it, and round the result, for "
            "example by quantize."
        )


def _passages(root: PreTrainedModel, config: ConvertConfig, held: Rows) -> tuple[Passages | None, str | None]:
    """The passages to measure recall on, where the caller or the variant asks for them; or why it cannot be measured.

    Raises:
        ValueError: there is a budget for recall, or a distance, and it cannot be measured.
    """
    reach = reach_of(config.variant, config.options)
    named = [name for name in ("min_recall", "recall_distance") if getattr(config, name) is not None]
    if not named and (reach is None or not predicts_next(root)):
        return None, None
    rows = [held.rows[place] for place in range(len(held))]
    try:
        return passages_beyond(root, rows, reach, config.recall_distance), None
    except ValueError as problem:
        if named:
            raise ValueError(f"{named[-1]}: {problem}") from None
        return None, str(problem)


def _measured_on(
    held: Rows, against: nn.Module, config: ConvertConfig, passages: Passages | None, progress: bool
) -> HeldOut:
    """The held-out rows, and what the model that others are compared with gives on them.

    Raises:
        ValueError: there is a budget for recall, and this model recalls nothing.
    """
    measured = HeldOut(
        against,
        held.batches(1 if config.low_memory else rows_per_step(config.distil, held)),
        head_trains=config.distil.rank is None and config.distil.trainable == (EVERYTHING,),
        as_it_is=True,
        passages=passages,
        progress=progress,
    )
    if config.min_recall is not None and not (measured.stock_recall is not None and measured.stock_recall > 0):
        raise ValueError(
            f"min_recall: the stock model gains nothing when a passage is read again ({measured.stock_recall:.3g} nats "
            "per token), so there is no recall to keep; leave out min_recall."
        )
    return measured


def _ends(rows: Rows) -> list[Tensor]:
    """The tensors of the first and the last row."""
    made = [rows.collate([dict(rows.rows[place])]) for place in (0, len(rows) - 1)]
    return [value for batch in made for value in batch.values() if isinstance(value, Tensor)]
