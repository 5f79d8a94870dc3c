"""Converts a checkpoint by `convert`, and saves what a user needs: model, tokenizer, results.json, card and report."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils.import_utils import is_compressed_tensors_available

from ..conversion.convert import convert, refuse_converted
from ..conversion.distributed import refuse_sharding
from ..conversion.journal import NAME
from ..conversion.quantize import quantize
from ..conversion.report import ConversionReport
from ..layer.calibration import FITS
from ..layer.registry import parse, parse_options
from ..text.typed import install
from ..variants.softmax import Softmax
from ..writing import claimed, saved_whole, sibling, told_where
from .card import RECALL, render
from .checkpoint import (
    check_dtype,
    copy_preprocessor,
    find_device,
    hub_arguments,
    load_weights,
    model_class,
    other_processor,
    processor_of,
    read_config,
    refuse_fresh_head,
    refuse_full,
)
from .results import (
    RESULTS_FILE,
    BaseModel,
    Budget,
    DataSet,
    Measured,
    Metric,
    RunResult,
    hardware,
    read_swaps,
    versions,
)

TASKS = {
    "AutoModelForCausalLM": "text-generation",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    "AutoModelForImageClassification": "image-classification",
}
LONGEST_NAME = 96  # characters of a name on the Hub
WORK = ".part"  # ends the name of the folder that an unfinished conversion keeps beside its result


def convert_checkpoint(
    source: str,
    variant: str | None,
    out: Path,
    data: Callable[[], tuple[Any, Any]],
    *,
    data_name: str,
    options: dict[str, Any],
    base_model: str | None = None,
    tokenizer: str | None = None,
    task: str | None = None,
    device: str | None = None,
    dtype: str = "auto",
    revision: str | None = None,
    token: str | None = None,
    bf16: bool = False,
    quantized: bool = False,
    keep_anyway: bool = False,
    overwrite: bool = False,
    notify: Callable[[str], None],
    quiet: bool = False,
    **arguments: Any,
) -> tuple[ConversionReport, bool]:
    """Load the model `source`, convert it, and save it in `out` unless the budget was missed.

    An unfinished conversion keeps its work in a folder beside `out`, and the same call goes on from there. Under
    `accelerate launch`, every process converts its share of each step, and the first process saves.

    Args:
        source: name on the Hub, or folder, of a stock model.
        variant: the name of the variant; None for stock attention, if the model is quantized.
        out: the folder for the result.
        data: gives the rows to convert on and the held-out rows or None, as `convert` takes them; called after
            everything else was checked.
        data_name: the name of the data for the card.
        options: the options of the variant.
        base_model: the name of the model on the Hub, for the card, if `source` is a folder.
        tokenizer: name on the Hub, or folder, of the tokenizer or image processor; None takes those of `source`.
        task: the AutoModel class; None takes the class that saved the model.
        device: such as "cpu" or "cuda"; None takes CUDA if there is one, and each process its own device.
        dtype: the precision of the weights; "auto" is that of the checkpoint.
        revision: branch, tag or commit on the Hub.
        token: of the Hub, for a private model.
        bf16: train under bf16 autocast. The weights keep their precision, and the losses are measured in that.
        quantized: end with 8-bit integers, by `quantize`.
        keep_anyway: save a model whose loss is above the budget, too.
        overwrite: write into a folder that is not empty.
        notify: receives a line before each step.
        quiet: show no progress.
        arguments: more arguments of `convert`, such as tokens, max_loss, layers and length.

    Returns:
        The report, and True if the model was saved.

    Raises:
        ValueError: the class, variant, option, layer or device is unknown, the data do not fit, `out` is not an empty
            folder, or another command writes into it.
        OSError: `source` cannot be read, or `out` cannot be written.
        ImportError: the result would be 8-bit integers, and compressed-tensors is not installed to load them.
    """
    if base_model is not None:
        _base(source, base_model, revision)  # refused now, and not after the conversion
    _refuse_full(out, overwrite, source)
    if variant is not None:
        parse_options(parse(variant), options)
    check_dtype(dtype)
    where = find_device(device)
    hub, own = hub_arguments(revision, token), hub_arguments(None, token)
    auto = model_class(read_config(source, **hub), task)
    work = sibling(out, WORK)
    training = _training(work, on_cpu=where == "cpu", bf16=bf16)
    refuse_sharding(training)
    if training.world_size > 1:
        notify(f"{training.world_size} processes: a training step reads {training.world_size} times the rows of one")
    with claimed(out, writes=training.should_save):
        if training.should_save:
            _refuse_full(out, overwrite, source)  # again: another command may have ended in the meantime
        if quantized and not is_compressed_tensors_available():
            raise ImportError(
                "compressed-tensors is not installed, and the saved integers could not be loaded without it; "
                f"{install('quant')}."
            )
        rows, held = data()
        notify(f"loading {source} as {auto.__name__}")
        model, fresh = load_weights(auto, source, dtype, **hub)
        refuse_fresh_head(source, auto, fresh)
        if fresh:
            notify(f"note: not in the checkpoint, so newly initialised: {', '.join(fresh)}")
        try:
            refuse_converted(model)
        except ValueError:
            if not quantized:
                raise ValueError(f"{source} is converted already; convert the stock model.") from None
            raise ValueError(
                f"{source} is converted already; give this command the stock model and --variant. "
                "hf_attn_swap.quantization.int8_static rounds a model as it is."
            ) from None
        model.to(training.device if device is None else where)
        with told_where(out):
            function: Any = quantize if quantized else convert
            report = function(
                model,
                data=rows,
                variant=variant,
                processor=processor_of(model, source, hub)
                if tokenizer is None
                else other_processor(model, tokenizer, own),
                eval_data=held,
                output_dir=work,
                args=training,
                progress=training.should_save and not quiet,
                **arguments,
                **options,
            )
            if not report.layers or not (report.met or keep_anyway):
                return report, False
            if not training.should_save:
                return report, True
            notify(f"saving in {out}")
            relation = "quantized" if quantized else "finetune"
            base = _base(source, base_model, revision, relation, auto_class(type(model).__name__))
            record = results(report, model, base, identifier(out.name).lower(), identifier(data_name), training)
            with saved_whole(out) as folder:
                model.save_pretrained(folder)
                copy_preprocessor(source, folder, **hub)
                if tokenizer is not None:
                    copy_preprocessor(tokenizer, folder, **own)
                report.save(folder)
                record.save(folder / RESULTS_FILE)
                (folder / "README.md").write_text(render(record), encoding="utf-8")
        (work / NAME).unlink(missing_ok=True)  # first: from now on the result is not made again
        shutil.rmtree(work, ignore_errors=True)
    return report, True


def results(
    report: ConversionReport,
    model: PreTrainedModel,
    base: BaseModel,
    name: str,
    data_name: str,
    training: TrainingArguments,
) -> RunResult:
    """The record of a conversion for the card: the converted model beside the base model as it is."""
    count = len(report.layers) + len(report.kept)
    own = {"variant": Softmax.name, "options": {Softmax.name: {}}, "layers": list(report.layers), "strength": 1.0}
    plain = {"modules": count, "swaps": [own]}
    block = getattr(model.config, "attn_swap", None) or plain
    modules, swaps = read_swaps(block)
    lost = report.lost
    converted, stock = [], []
    for metric, higher, ours, theirs in (
        ("accuracy", True, lost.accuracy, lost.stock_accuracy),
        ("spearmanr", True, lost.correlation, lost.stock_correlation),
        ("perplexity", False, lost.perplexity, lost.stock_perplexity),
        ("kl_to_pretrained", False, lost.divergence, 0.0),
        ("agreement", True, lost.agreement, 1.0),
        ("relative_error", False, lost.relative_error, 0.0),
        (f"{RECALL}{lost.recall_distance}", True, lost.recall, lost.stock_recall),
    ):
        if ours is not None and theirs is not None:
            converted.append(Metric(name=metric, higher_is_better=higher, values=(ours,)))
            stock.append(Metric(name=metric, higher_is_better=higher, values=(theirs,)))
    seconds = sum(step.seconds for step in report.steps)
    sentences = [report.summary, *(f"{step.name}: {step.cells()[2]} lost." for step in report.steps)]
    if training.bf16 and report.trained:
        sentences.append("Trained under bf16 autocast.")
    fits = [fit for fit in FITS if any(step.name == f"fit: {fit}" for step in report.steps)]
    return RunResult(
        name=name,
        base=base,
        modules=modules,
        swaps=swaps,
        parameters_added=sum(p.numel() for n, p in model.named_parameters() if "attn_swap" in n),
        conversion=tuple(sentences),
        steps=(*fits, "distil") if report.trained else tuple(fits),
        task=TASKS.get(base.auto_class, "feature-extraction"),
        data=DataSet(
            name=data_name,
            config=None,
            revision=None,
            rows={"train": report.train_rows, "held_out": report.held_out},
            evaluated="held_out",
        ),
        converted=Measured(seeds=(0,), metrics=tuple(converted), outliers=None, wall_seconds=seconds),
        control=None,
        stock=Measured(seeds=(0,), metrics=tuple(stock), outliers=None, wall_seconds=0.0),
        difference=None,
        cost=None,
        budget=Budget(
            steps=report.training_steps,
            batch_size=report.rows_per_step,
            sequence_length=max(1, round(report.row_length)),
            learning_rate=report.learning_rate if report.trained else None,
            optimizer=str(getattr(training.optim, "value", training.optim)) if report.trained else None,
        ),
        versions=versions(),
        hardware=hardware(training),
        wall_seconds=seconds,
        intended_use="As the base model." if block is plain else "As the base model; the attention is another one.",
        limits=("The loss was measured on a few held-out rows of the same data; other data can lose more.",),
        license="other",
        language=(),
    )


def _base(
    source: str, named: str | None, revision: str | None, relation: str = "finetune", kind: str = "AutoModel"
) -> BaseModel:
    """The base model for the card. The name of a folder is no name on the Hub, unless the user gives one.

    Raises:
        ValueError: the given name cannot be a name on the Hub.
    """
    folder = Path(source).is_dir()
    name = named or (identifier(Path(source).name) if folder else source)
    return BaseModel(
        name=name,
        revision=revision,
        relation=relation,
        auto_class=kind,
        on_hub=named is not None or not folder,
    )


def _refuse_full(out: Path, overwrite: bool, source: str) -> None:
    """As `refuse_full`, unless a run of the same conversion was killed while it saved."""
    refuse_full(out, overwrite or (sibling(out, WORK) / NAME).exists(), source)


def _training(work: Path, *, on_cpu: bool, bf16: bool) -> TrainingArguments:
    """The arguments of the training. They also connect the processes, if there are several."""
    backend = "gloo" if on_cpu and "WORLD_SIZE" in os.environ else None
    return TrainingArguments(output_dir=str(work), report_to="none", use_cpu=on_cpu, bf16=bf16, ddp_backend=backend)


def auto_class(kind: str) -> str:
    """The name of the AutoModel class that loads models of the class `kind`, such as AutoModelForMaskedLM."""
    name = f"AutoModelFor{'CausalLM' if kind.endswith('LMHeadModel') else kind.rpartition('For')[2]}"
    return name if hasattr(transformers, name) else "AutoModel"


def identifier(text: str) -> str:
    """The text with a dash instead of every character that a name on the Hub may not have."""
    dashed = re.sub(r"[^A-Za-z0-9._/-]+", "-", text)
    return re.sub(r"([-.])[-.]+", r"\1", dashed).strip("-._/")[:LONGEST_NAME] or "unnamed"
