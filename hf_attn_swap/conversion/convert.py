"""Converts a model to another attention by one call: swap, absorb a sink, fit, choose layers, distil; each is measured.

The steps, each measured on held-out rows (`steps/`, a file each):

    1. stock:      with bits=8, what the stock model loses in 8 bits
    2. swap:       the variant in all layers that may be converted
    3. absorb:     in a causal language model, the keys and values of one token as a sink, if less is lost with it
    4. heads:      with heads="auto", what each key/value head alone costs decides which heads keep all keys
    5. fit:        no fit, a gain or a map per head, whichever loses least (or as `stages` say)
    6. choose:     with a budget or a share to keep, what each layer alone costs decides about the order
    7. distil:     the original model teaches the swapped model, group of layers by group of layers
    8. finish:     adapters merged into the weights, no swap in layers that keep their own attention
    9. smooth:     with bits=8, channels of like sizes, if less is lost in 8 bits with them
    10. qat:       with bits=8, the model in full precision teaches the rounded model, while tokens are left
    11. integers:  with bits=8, weights in 8-bit integers, and a static range for each input

With a budget, the cheapest layers come first. A group whose loss comes within the budget is followed by the next group.
If the tokens are used up before, the last group is taken back. Without a choice of layers, the weights with
which the model lost least are the result: a training that made it worse is taken back. Labels are not read by any step.
The method is this package's own; docs/mathematics.md, section Conversion.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal

from accelerate.utils import FullyShardedDataParallelPlugin, is_compiled_module
from torch import Tensor, nn
from transformers import PreTrainedModel, TrainingArguments

from ..layer.calibration import FITS
from ..layer.registry import canonical_keys, parse
from ..measuring.held_out import HeldOut
from ..measuring.lost import predicts_next
from ..measuring.recall import Passages
from ..patch import choose_layers, swappable, unpatch_model
from ..quantization.static import check_linears
from ..text.tokenizer import own_tokenizer
from ..text.typed import refuse_name
from ..variants.sink import Sink
from ..variants.softmax import Softmax
from ..wiring.install import Installation, Record, installation_of, model_root
from ..writing import claimed, told_where
from .adapters import refuse_adapters
from .engine import name_of, take
from .full_heads import OPTION, by_heads
from .journal import Journal, fingerprint
from .lesson import rows_per_step
from .losses import refuse_without_logits
from .outcome import ConversionReport
from .parts import EVERYTHING
from .passages import passages_beyond, reach_of
from .plan import plan_of
from .preserve_training_state import preserve_training_state
from .processes import broadcast_from_rank0, how_to_split
from .rows import Rows
from .sensitivity import HeadSensitivity, Sensitivity
from .split import split, try_longest
from .stages import Calibrate, Stage
from .state import Budget, ConvertConfig, State
from .steps import STEPS
from .teacher import check_teacher, is_sharded


def convert(
    model: nn.Module,
    variant: str,
    data: Any,
    *,
    processor: Any = None,
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
    stages: Sequence[Stage] | None = None,
    low_memory: bool = False,
    bits: Literal[8] | None = None,
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
        stages: how to convert; None chooses by the kind and size of the model. At most one `Calibrate` comes first
            and names the fit. One or more `Distil` follow. The last takes what is left of `tokens`; each before it
            takes its own `tokens`, in each group of layers. `Distil(layers=1.0, logits=0.0, tokens=...)` aligns the
            swapped layers with the original ones. All train the same weights.
        low_memory: trade time for memory: adapters instead of all weights, one row at a time, and activations that
            are computed again in the backward pass. The steps have the same number of rows.
        bits: 8 ends with a model in 8-bit integers, as `int8_static` makes it, which `save_pretrained` saves. Sinks and
            channels are then chosen by what is lost in 8 bits, and the variant "softmax" stands for stock attention,
            with a sink if it helps. Half of `tokens` (all of them, for "softmax") then train the norms, the biases and
            the sink of a float32 model as it will run, with rounding.
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
        ValueError: the model is already converted or quantized, the data do not fit the model, an argument is out of
            range, the folder holds another conversion, or another process writes into it. After an error the model is
            the stock model as it was; after an interruption of the last measurement, when the adapters are merged, it
            is the converted model.
        OSError: the folder cannot be written.
    """
    root = model_root(model)
    if is_compiled_module(model):
        (model,) = model.children()
    refuse_converted(model)
    refuse_adapters(model)
    refuse_rounded(root)
    refuse_name(processor, "processor")
    _check_numbers(max_loss, min_recall, recall_distance, keep, tokens, eval_tokens)
    _check_heads(heads, variant, keep, options)
    _check_fit(fit, stages)
    if bits is not None:
        _check_bits(root, bits)
    if teacher is not None:
        check_teacher(root, teacher)
    named = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else layers
    variant = "+".join(cls.name for cls in parse(variant))
    config = ConvertConfig(
        variant=variant,
        options=options,
        layers=None if named == "auto" else named,
        modules=modules,
        max_loss=max_loss,
        min_recall=min_recall,
        recall_distance=recall_distance,
        heads=heads,
        fit=fit,
        keep=keep,
        absorb=absorb,
        processor=own_tokenizer(processor),
        low_memory=low_memory,
        bits=bits,
        plan=plan_of(root, variant, stages, low_memory=low_memory),
    )
    control = installation_of(root)
    choose_layers(swappable(control or Installation(root, Record())), config.layers, modules)  # refused before all else
    if control is not None:
        unpatch_model(model)
    with contextlib.ExitStack() as inside:
        for each in (model,) if teacher is None else (model, teacher):
            inside.enter_context(preserve_training_state(each))
        folder = Path(inside.enter_context(tempfile.TemporaryDirectory())) if output_dir is None else Path(output_dir)
        args = args or TrainingArguments(output_dir=str(folder), report_to="none")
        fsdp = how_to_split(args, root)
        if output_dir is not None:
            inside.enter_context(claimed(folder, writes=args.should_save, inside=True))
            inside.enter_context(told_where(folder))
        train, held = split(
            root,
            data,
            eval_data,
            processor,
            length,
            tokens=tokens,
            eval_tokens=eval_tokens,
            fewest=0 if config.plan.calibrate is None else config.plan.calibrate.rows,
        )
        output = try_longest(root, train)
        for stage in config.plan.distil:
            refuse_without_logits(stage.losses, output)
        settings = _settings(root, teacher, config, tokens, train, held, args, fsdp)
        if broadcast_from_rank0(settings["weights"], args) != settings["weights"]:
            raise ValueError(
                "the processes have other weights than the first; each has to load the whole model (for FSDP, with "
                "--fsdp_cpu_ram_efficient_loading false)."
            )
        passages, why_not = _passages(root, config, held)
        state = State(
            model=model,
            rows=train,
            args=args,
            folder=folder,
            journal=_journal(None if output_dir is None else folder, settings, args),
            held=_measured_on(held, teacher or model, config, passages, progress),
            teacher=teacher,
            request=config,
            budget=Budget(left=tokens, reserved=_reserved(variant, tokens, bits)),
            progress=progress,
            fsdp=fsdp,
        )
        if eval_data is not None and not held.whole:
            state.say(
                f"The loss was measured on {len(held):,} rows, a part of the held-out data; a larger eval_tokens takes "
                "more of them."
            )
        if why_not is not None:
            state.say(f"Recall was not measured: {why_not}")
        try:
            take(state, STEPS)
        except BaseException as error:
            _undo(state, error)
            raise
    return _report(root, config, state, held)


def _journal(folder: Path | None, settings: dict[str, Any], args: TrainingArguments) -> Journal:
    """The journal in a folder, which all processes read.

    Raises:
        ValueError: the folder holds another conversion, or the processes do not see the same folder.
    """
    found = Journal(folder, settings, writes=args.should_save)
    if broadcast_from_rank0(len(found.entries), args) != len(found.entries):
        raise ValueError(f"{folder} holds other files for the first process; name a folder that all processes share.")
    return found


def _undo(state: State, error: BaseException) -> None:
    """Make the model the stock model again after an error, which stays the error that is raised."""
    try:
        state.undo()
    except Exception as problem:  # noqa: BLE001  # anything may be broken now, and the first error says why
        if hasattr(error, "add_note"):  # since Python 3.11
            error.add_note(f"The model could not be made the stock model again ({problem}); load it anew.")


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
    if not rounded and not is_sharded(root):
        rounded = any(type(each) is not nn.Parameter or not each.is_floating_point() for each in root.parameters())
    if rounded:
        raise ValueError(
            f"the weights of this {type(root).__name__} are rounded (quantized) already, and a conversion changes "
            "weights in floating point; load the model without quantization, convert it, and round the result, for "
            "example by convert(bits=8)."
        )


def _check_numbers(
    max_loss: Any, min_recall: Any, recall_distance: Any, keep: Any, tokens: Any, eval_tokens: Any
) -> None:
    """Refuse numbers that are out of range, and texts such as "2%", which the command line alone reads.

    Raises:
        ValueError: one of them is.
    """
    if max_loss is not None and not (isinstance(max_loss, Real) and 0 < float(max_loss) <= 1):
        raise ValueError(f"max_loss is a share above 0 and at most 1 (0.02 is 2 %), got {max_loss!r}.")
    if min_recall is not None and not (isinstance(min_recall, Real) and 0 < float(min_recall) <= 1):
        raise ValueError(f"min_recall is a share above 0 and at most 1 (0.97 is 97 %), got {min_recall!r}.")
    if recall_distance is not None and not (isinstance(recall_distance, Integral) and int(recall_distance) >= 1):
        raise ValueError(f"recall_distance is a whole number of tokens, at least 1, got {recall_distance!r}.")
    if not (isinstance(keep, Real) and 0 <= float(keep) < 1):
        raise ValueError(f"keep is the share of layers that stay as they are, from 0 to below 1, got {keep!r}.")
    if not (isinstance(tokens, Integral) and int(tokens) >= 0):
        raise ValueError(f"tokens must be a whole number such as 300_000 (0 trains nothing), got {tokens!r}.")
    if eval_tokens is not None and not (isinstance(eval_tokens, Integral) and int(eval_tokens) >= 1):
        raise ValueError(f"eval_tokens must be a whole number of at least 1, such as 32_768, got {eval_tokens!r}.")


def _check_heads(heads: Any, variant: str, keep: float, options: dict[str, Any]) -> None:
    """Refuse a choice of heads that has nothing to choose.

    Raises:
        ValueError: the variant cannot leave heads as they are, no share is kept, or heads are named as well.
    """
    if heads is None:
        return
    if heads != "auto":
        raise ValueError(
            f'heads is "auto" or None, got {heads!r}; to name the heads of a layer, use patch_model(model, variant, '
            f"layers=..., {OPTION}=...)."
        )
    classes = parse(variant)
    name = by_heads(classes)
    if not keep:
        raise ValueError('heads="auto" chooses the heads that keep all keys: give their share, such as keep=0.5.')
    if OPTION in (options if len(classes) == 1 else canonical_keys(options).get(name, {})):
        raise ValueError(f'heads="auto" chooses {OPTION}; leave one of them out.')


def _check_fit(fit: Any, stages: Sequence[Stage] | None) -> None:
    """Refuse an unknown fit, and a second one.

    Raises:
        ValueError: says what can be named.
    """
    if fit not in ("auto", None, *FITS):
        raise ValueError(f'fit is "auto", None or one of {", ".join(FITS)}, got {fit!r}.')
    if fit != "auto" and any(isinstance(stage, Calibrate) for stage in stages or ()):
        raise ValueError("the stage Calibrate names a fit; leave out fit, or this stage.")


def _check_bits(root: PreTrainedModel, bits: Any) -> None:
    """Refuse a number of bits that is not 8, and a model without matrices that 8-bit integers can hold.

    Raises:
        ValueError: says what can be done instead.
    """
    if bits != 8 or isinstance(bits, bool):
        raise ValueError(f"bits must be 8, or left out for full precision, got {bits!r}.")
    check_linears(root)


def _settings(
    root: PreTrainedModel,
    teacher: PreTrainedModel | None,
    config: ConvertConfig,
    tokens: int,
    train: Rows,
    held: Rows,
    args: TrainingArguments,
    fsdp: FullyShardedDataParallelPlugin | None,
) -> dict[str, Any]:
    """All that decides about the result, as plain data: a journal of other settings is refused."""
    return {
        "model": type(root).__name__,
        "weights": fingerprint(root.parameters()),
        "teacher": None if teacher is None else fingerprint(teacher.parameters()),
        "data": fingerprint(_ends(train) + _ends(held)),
        "variant": config.variant,
        "options": canonical_keys(config.options) if "+" in config.variant else config.options,
        "tokens": tokens,
        "max_loss": config.max_loss,
        "layers": config.layers,
        "keep": config.keep,
        "absorb": config.absorb,
        "steps": [name_of(step) for step in STEPS],
        "stages": [{"stage": stage.name, **asdict(stage)} for stage in config.plan.stages],
        "low_memory": config.low_memory,
        "rows": len(train),
        "held_out": len(held),
        "length": train.length,
        **({} if config.modules is None else {"modules": config.modules}),
        **({"bf16": True} if args.bf16 else {}),
        **({} if args.world_size == 1 else {"processes": args.world_size}),
        **({} if fsdp is None else {"fsdp": fsdp.fsdp_version}),
        **({} if config.bits is None else {"bits": config.bits}),
        **({} if config.min_recall is None else {"min_recall": config.min_recall}),
        **({} if config.recall_distance is None else {"recall_distance": config.recall_distance}),
        **({} if config.heads is None else {"heads": config.heads}),
        **({} if config.fit == "auto" else {"fit": config.fit}),
    }


def _reserved(variant: str, tokens: int, bits: int | None) -> int:
    """The tokens for the training with rounding: half of them, or all if the variant is stock attention with a sink."""
    if bits is None:
        return 0
    return tokens if set(parse(variant)) <= {Softmax, Sink} else tokens // 2


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
    last = config.plan.last
    found = HeldOut(
        against,
        held.batches(1 if config.low_memory else rows_per_step(last, held)),
        head_trains=last.rank is None and last.trainable == (EVERYTHING,),
        as_it_is=True,
        passages=passages,
        progress=progress,
    )
    if config.min_recall is not None and not (found.stock_recall is not None and found.stock_recall > 0):
        raise ValueError(
            f"min_recall: the stock model gains nothing when a passage is read again ({found.stock_recall:.3g} nats "
            "per token), so there is no recall to keep; leave out min_recall."
        )
    return found


def _report(root: PreTrainedModel, config: ConvertConfig, state: State, held: Rows) -> ConversionReport:
    """What the steps did."""
    sensitivity, by_head = (state.notes.get(name) for name in ("sensitivity", "head_sensitivity"))
    last = config.plan.last
    return ConversionReport(
        model=type(root).__name__,
        variant=state.variant,
        steps=tuple(state.record),
        said=(*state.notes.get("sentences", ()), *_together(state)),
        kept=state.kept,
        max_loss=config.max_loss,
        min_recall=config.min_recall,
        sensitivity=None if sensitivity is None else Sensitivity.from_dict(sensitivity),
        head_sensitivity=None if by_head is None else HeadSensitivity.from_dict(by_head),
        unit=state.rows.unit,
        held_out=len(held),
        row_length=state.rows.length,
        train_rows=len(state.rows),
        rows_per_step=rows_per_step(last, state.rows, state.args.world_size),
        learning_rate=last.learning_rate,
        trained=state.changed,
    )


def _together(state: State) -> list[str]:
    """What several processes did together, if they trained: a sentence."""
    count, rows = state.args.world_size, rows_per_step(state.config.plan.last, state.rows)
    if count == 1 or not any(step.tokens for step in state.record):
        return []
    split = "" if state.fsdp is None else " FSDP2 split the trainings over them."
    return [f"{count} processes trained together, so a training step read {count} x {rows} rows.{split}"]


def _ends(rows: Rows) -> list[Tensor]:
    """The tensors of the first and the last row."""
    made = [rows.collate([dict(rows.rows[place])]) for place in (0, len(rows) - 1)]
    return [value for batch in made for value in batch.values() if isinstance(value, Tensor)]
