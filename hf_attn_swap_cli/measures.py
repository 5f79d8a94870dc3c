"""The commands that measure saved models: evaluate and compare."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import Command, app, told
from .options import (
    LENGTH,
    AsJson,
    Columns,
    Config,
    Data,
    Device,
    Dtype,
    Length,
    Model,
    Quiet,
    Revision,
    Split,
    Stream,
    Task,
    Token,
    Tokenizer,
    columns,
)

if TYPE_CHECKING:
    from hf_attn_swap.analysis.cost import Cost
    from hf_attn_swap.analysis.outliers import Outliers
    from hf_attn_swap.measuring.recall import Recall
    from hf_attn_swap.text.table import Table

Label = Annotated[
    str | None, typer.Option(help="Column of the class (or the number, of a regression), for the metric.")
]
RowCount = Annotated[int, typer.Option(min=1, help="Number of rows, or blocks of text, from the first.")]
NAMES = ("first", "second")  # of the two models
FEW = 8  # batches at most that are timed, and searched for outliers
ROWS = (  # the rows of the table that `compare` prints: words, name of the figure, unit
    ("milliseconds per batch", "milliseconds", 1),
    ("MB of parameters", "parameter_bytes", 1e6),
    ("MB that a pass adds, at its peak", "peak_bytes", 1e6),
    ("kurtosis of the hidden states", "kurtosis", 1),
    ("infinity norm of the hidden states", "max_inf_norm", 1),
)


@app.command(cls=Command)
def compare(
    first: Model,
    second: Model,
    data: Data,
    column: Columns = None,
    label: Label = None,
    config: Config = None,
    split: Split = None,
    stream: Stream = None,
    rows: RowCount = 64,
    length: Length = None,
    tokenizer: Tokenizer = None,
    task: Task = None,
    device: Device = None,
    dtype: Dtype = "auto",
    token: Token = None,
    bits: Annotated[
        bool, typer.Option("--in-8-bits", help="Measure too what each loses in 8 bits, as machines run them.")
    ] = False,
    recalled: Annotated[
        bool, typer.Option("--recall", help="Measure too what each recalls of a passage, by distance.")
    ] = False,
    hidden: Annotated[
        bool, typer.Option("--needle", help="Measure too which hidden numbers, and which pairs of tokens, each finds.")
    ] = False,
    generated: Annotated[
        bool, typer.Option("--generate", help="Let both write: how far their texts are equal, and answers of tasks.")
    ] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare two saved models on the same rows. For example a base and the model that was converted from it.

    The first model is the one that the second is measured against: KL, equal first choices, and perplexity, accuracy
    or, for a regression, Spearman's rank correlation with the labels; for a language model, the loss by position.
    Below stand the time of a pass, the memory, and the outliers in the hidden states of both, on at most eight batches
    at equal distances. The models take turns on a batch, nine times, and the times are those of the turn with the
    median ratio. The peak of the memory is told on CUDA alone. The 8-bit ranges of --in-8-bits come from as many more
    rows of the data, behind the ones that are measured. --recall tells what a passage of the rows gains when it is
    read again after 64, 200, 512 and 2048 tokens, as far as the rows and the models are long enough. --needle hides
    numbers in texts of 256, 1024 and 4096 tokens of the rows, at five depths, and asks for their digits; and it asks
    for the second tokens of 16, 64 and 256 pairs of tokens that were read once. --generate lets both continue 16
    pieces of the rows, and answer three tasks after RULER at 1024 and 4096 tokens: one of four hidden numbers, a chain
    of variables, and the common words of a list.
    """
    from hf_attn_swap.analysis.cost import compare_costs
    from hf_attn_swap.analysis.inputs import words_of
    from hf_attn_swap.analysis.outliers import outliers
    from hf_attn_swap.conversion.report import in_words
    from hf_attn_swap.measuring.batches import check_length, usual_length
    from hf_attn_swap.measuring.generation import agreement
    from hf_attn_swap.measuring.held_out import HeldOut
    from hf_attn_swap.measuring.lost import position_table
    from hf_attn_swap.quantization import lost_in_8_bits
    from hf_attn_swap.text.finite import finite

    models = [_load(name, task, quiet, device=device, dtype=dtype, token=token) for name in (first, second)]
    processor = _processor(models[0], first, tokenizer, None, token)
    _check_vocabularies(models, (first, second), processor, token)
    where = (models[0], processor, data, columns(column))
    size = length or usual_length(models, LENGTH)
    batches = _batches(*where, label, config, split, stream, rows, size)
    ranges = _batches(*where, None, config, split, stream, rows, size, skipped=rows) if bits else []
    if bits and not ranges:
        raise ValueError("--in-8-bits: no rows are left for the 8-bit ranges; measure fewer with --rows.")
    for model in models:
        check_length(model, batches)
    wanted = {"recall": recalled, "needle": hidden, "generate": generated}
    context = _context(models, processor, batches, wanted)  # refused now, if at all
    held = HeldOut(models[0], batches, as_it_is=True)
    loss = held.lost(models[1], progress=True)
    if label is not None and loss.accuracy is None and loss.correlation is None:
        raise ValueError(f"--label {label}: this model's outputs are not compared with labels; leave out --label.")
    few = [kept.batch for kept in held.subset(FEW).kept]
    costs, ratio = compare_costs(models[0], models[1], few)
    states = [outliers(model, few) for model in models]
    rounded = [lost_in_8_bits(model, ranges, held) for model in models] if bits else []
    recalled_by = {
        name: [texts.measure(model, progress=True) for model in models] for name, (texts, _) in context.items()
    }
    if as_json:
        more = {"loss": loss.degradation, "measure": loss.measure, "time_ratio": ratio}
        both = dict(zip(NAMES, map(_figures, costs, states), strict=True))
        for figures, loss_in_8_bits in zip(both.values(), rounded, strict=False):
            figures["loss_in_8_bits"] = loss_in_8_bits.degradation
        for name, results in recalled_by.items():
            for figures, result in zip(both.values(), results, strict=True):
                figures[name] = result.to_dict()
        if generated:
            more["equal_tokens"], more["tokens_before_difference"] = agreement(*recalled_by["continuations"])
        print(json.dumps(finite({**loss.to_dict(), **more, **both}), indent=1))
        return
    print(f"{second} beside {first}, {sum(map(_rows, batches))} rows of {data}")
    print(loss)
    if len(loss.by_position) > 1:
        print(position_table(loss.by_position, NAMES).text())
    print(_table(costs, states, ratio).text())
    _show_largest(states, words_of(processor, few) if models[0].main_input_name == "input_ids" else {})
    if bits:
        own, other = map(in_words, rounded)
        print(f"In 8 bits, beside the first model in full precision: {own} lost by the first, {other} by the second.")
    for name, results in recalled_by.items():
        print(context[name][1](dict(zip(NAMES, results, strict=True))).text())
    if costs[0].peak_bytes is None:
        print("The memory of a pass is measured on CUDA alone; here it is the parameters' memory.")


@app.command(cls=Command)
def evaluate(
    model: Model,
    data: Data,
    column: Columns = None,
    label: Label = None,
    config: Config = None,
    split: Split = None,
    stream: Stream = None,
    rows: RowCount = 64,
    length: Length = None,
    tokenizer: Tokenizer = None,
    task: Task = None,
    device: Device = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure one saved model. Its perplexity, a classifier's accuracy, or a regression's rank correlation."""
    from hf_attn_swap.measuring.batches import check_length, usual_length
    from hf_attn_swap.measuring.held_out import HeldOut
    from hf_attn_swap.measuring.lm_head import names_head
    from hf_attn_swap.text.finite import finite

    loaded = _load(model, task, quiet, device=device, dtype=dtype, revision=revision, token=token)
    if not names_head(type(loaded).__name__):
        raise ValueError(
            f"{model} is a {type(loaded).__name__}, which has no head, so it predicts nothing that could be "
            "right or wrong; name a class that the checkpoint has a head for with --task, or "
            "compare its hidden states with those of another model (hf-attn-swap compare)."
        )
    processor = _processor(loaded, model, tokenizer, revision, token)
    size = length or usual_length([loaded], LENGTH)
    batches = _batches(loaded, processor, data, columns(column), label, config, split, stream, rows, size)
    check_length(loaded, batches)
    loss = HeldOut(loaded, batches, as_it_is=True).baseline()
    figures = {"perplexity": loss.perplexity, "accuracy": loss.accuracy, "spearmanr": loss.correlation}
    known = {name: value for name, value in figures.items() if value is not None}
    if not known:
        raise ValueError(
            "this model has no perplexity, accuracy or rank correlation here; name the column of the classes or "
            "numbers with --label, or compare the model with another model (hf-attn-swap compare)."
        )
    print(json.dumps(finite(known)) if as_json else "\n".join(f"{name}: {value:.4g}" for name, value in known.items()))


def _load(name: str, task: str | None, quiet: bool, **where: Any) -> Any:
    """A saved model in evaluation mode."""
    from hf_attn_swap.publish.checkpoint import load_checkpoint

    told(quiet)(f"loading {name}")
    return load_checkpoint(name, task, **where)


def _processor(model: Any, name: str, other: str | None, revision: str | None, token: str | None) -> Any:
    """The tokenizer or image processor that the user names, or that of the model."""
    from hf_attn_swap.publish.checkpoint import hub_arguments, other_processor, processor_of

    if other is not None:
        return other_processor(model, other, hub_arguments(None, token))
    return processor_of(model, name, hub_arguments(revision, token))


def _check_vocabularies(models: Sequence[Any], names: tuple[str, str], tokenizer: Any, token: str | None) -> None:
    """Refuse two models of text that read the same token ids as different tokens.

    Raises:
        ValueError: the tokenizer of the second model has other ids for tokens of the first, or it has no tokenizer and
            another number of tokens.
    """
    from hf_attn_swap.publish.checkpoint import hub_arguments, processor_of

    if any(model.main_input_name != "input_ids" for model in models):
        return
    sizes = [model.config.get_text_config().vocab_size for model in models]
    alike = sizes[0] == sizes[1]
    try:
        other = processor_of(models[1], names[1], hub_arguments(None, token)).get_vocab()
    except ValueError:  # it has no tokenizer
        pass
    else:
        alike = all(other.get(word) == place for word, place in tokenizer.get_vocab().items())
        sizes = [len(tokenizer), len(other)]
    if not alike:
        raise ValueError(
            f"{names[0]} and {names[1]} have different vocabularies, of {sizes[0]:,} and {sizes[1]:,} tokens: the same "
            "row would be another text to each of them. Compare models that have the same tokenizer."
        )


def _batches(
    model: Any,
    processor: Any,
    data: str,
    names: list[str],
    label: str | None,
    config: str | None,
    split: str | None,
    stream: bool | None,
    rows: int,
    length: int,
    *,
    skipped: int = 0,
) -> list[dict[str, Any]]:
    """The first rows of the data, behind the skipped ones, as the model takes them, in batches. No more is read."""
    from hf_attn_swap.conversion.rows import as_rows
    from hf_attn_swap.measuring.lost import predicts_next
    from hf_attn_swap.training.data import column_names, filled_rows, open_rows

    source = open_rows(data, config, split, names, stream=stream, in_order=True)
    if label is not None and label not in (there := column_names(source)):
        raise ValueError(f"the data have no column {label!r}; they have {', '.join(there)}.")
    joined = predicts_next(model)
    if label is not None and joined:
        raise ValueError("a language model has no use for --label: its rows are blocks of joined text.")
    count = skipped + rows
    values: Any = filled_rows(source, names, label)
    labels: list[Any] = []
    if not joined:
        values = itertools.islice(values, count)
    if label is not None:
        values, labels = map(list, zip(*values, strict=True))
    # As a stream: of a long list, rows at random places would be taken, and the labels would belong to other rows.
    prepared = as_rows(
        model, iter(values), processor, length=length, most=count * length, most_rows=count, fewest=count
    )
    chosen = [prepared.rows[place] for place in range(skipped, min(count, len(prepared)))]
    for row, number in zip(chosen, labels, strict=False):
        row["labels"] = number
    batches = list(replace(prepared, rows=chosen).batches(8))
    if label is not None:
        _check_labels(batches, label, model.config.num_labels)
    return batches


def _check_labels(batches: Sequence[dict[str, Any]], label: str, classes: int) -> None:
    """Refuse labels that a metric cannot read. A batch has labels only if each of them is a class or a number.

    Raises:
        ValueError: a label is of another kind, or a class that the model does not have; or all labels of a regression
            are equal.
    """
    other = "name another column, or another --split: a split whose labels are not public has -1 in their place."
    if any("labels" not in batch for batch in batches):
        raise ValueError(
            f"--label {label}: every row needs the number of a class, from 0 (of a regression: a number); {other}"
        )
    values = [value for batch in batches for value in batch["labels"].tolist()]
    if isinstance(values[0], float) and len(set(values)) == 1 < len(values):
        raise ValueError(f"--label {label}: all rows have the number {values[0]:g}; {other}")
    if isinstance(values[0], int) and max(values) >= classes:
        raise ValueError(
            f"--label {label}: a row has the class {max(values)}, and the model has {classes} classes, from 0 to "
            f"{classes - 1}."
        )


def _context(
    models: Sequence[Any], processor: Any, batches: Sequence[dict[str, Any]], wanted: Mapping[str, bool]
) -> dict[str, tuple[Any, Callable[[Mapping[str, Any]], Table]]]:
    """The texts of the measures of long context that were asked for, and how what models find in them is shown."""
    from hf_attn_swap.measuring.batches import max_positions
    from hf_attn_swap.measuring.generation import agreement_table, continuations, score_table, tasks
    from hf_attn_swap.measuring.recall import Passages
    from hf_attn_swap.measuring.retrieval import haystacks, key_value_table, needle_table, pair_texts

    shortest = min(models, key=lambda model: max_positions(model) or math.inf)
    context: dict[str, tuple[Any, Callable[[Mapping[str, Any]], Table]]] = {}
    if wanted["recall"]:
        context["recall"] = (Passages.of(shortest, batches), _recall_table)
    if wanted["needle"]:
        context["needle"] = (haystacks(shortest, batches, processor), needle_table)
        context["key_values"] = (pair_texts(shortest, batches, processor), key_value_table)
    if wanted["generate"]:
        context["continuations"] = (continuations(shortest, batches, processor), agreement_table)
        context["tasks"] = (tasks(shortest, batches, processor), score_table)
    return context


def _rows(batch: dict[str, Any]) -> int:
    """The number of rows of a batch."""
    return len(next(iter(batch.values())))


def _figures(cost: Cost, outliers: Outliers | None) -> dict[str, Any]:
    """The cost and the outliers of one model as plain data; None stands for a figure that was not measured."""
    from hf_attn_swap.text.finite import finite

    measured = {} if outliers is None else asdict(outliers)
    return {**asdict(cost), **{name: finite(measured.get(name)) for name in ("kurtosis", "max_inf_norm", "largest")}}


def _show_largest(states: Sequence[Outliers | None], words: dict[int, str]) -> None:
    """Print the largest activation of each model, its layer and its token."""
    for name, outliers in zip(NAMES, states, strict=True):
        if outliers is not None:
            layer, largest = max(enumerate(outliers.largest), key=lambda pair: pair[1].value)
            print(f"The largest activation of the {name}, after layer {layer}: {largest.of(words)}")


def _recall_table(by_name: Mapping[str, Recall]) -> Table:
    """What both models recall, by distance."""
    from hf_attn_swap.text.table import Table

    first, second = by_name.values()
    rows = [
        (
            f"{distance:,}",
            *(f"{recall.mean(distance):.3f} ± {recall.spread(distance):.3f}" for recall in (first, second)),
            f"{second.mean(distance) / first.mean(distance):.1%}" if first.mean(distance) > 0 else "-",
        )
        for distance in first.gains
    ]
    passages = len(next(iter(first.gains.values())))
    summary = f"Nats per token that a passage gains when it is read again: mean and spread of {passages} passages."
    return Table(summary=summary, header=("tokens between", *by_name, "ratio"), rows=rows)


def _table(costs: Sequence[Cost], states: Sequence[Outliers | None], ratio: float) -> Table:
    """Time, memory and outliers of both models."""
    from hf_attn_swap.text.table import Table

    figures = list(map(_figures, costs, states))
    rows = []
    for name, key, unit in ROWS:
        first, second = (by_name[key] for by_name in figures)
        if first is not None and second is not None:
            over = ratio if key == "milliseconds" else second / first
            rows.append((name, f"{first / unit:.4g}", f"{second / unit:.4g}", f"{over:.2f}"))
    summary = "What a pass costs, and its outliers; the ratio is the second model's figure to the first's."
    return Table(summary=summary, header=("", "first", "second", "ratio"), rows=rows)
