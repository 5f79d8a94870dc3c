"""The commands that measure saved models: evaluate and compare."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .app import Command, app, show, told
from .options import (
    AsJson,
    Columns,
    Config,
    Data,
    Device,
    Dtype,
    Model,
    Quiet,
    Revision,
    Split,
    Stream,
    Task,
    Token,
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
Length = Annotated[int, typer.Option(min=2, help="Number of tokens of a row.")]
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
    length: Length = 512,
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
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Compare two saved models, such as a base and the model that was converted from it, on the same rows.

    The first model is the one that the second is measured against: KL, equal first choices, and perplexity, accuracy
    or, for a regression, Spearman's rank correlation with the labels. Below stand the time of a pass, the memory, and
    the outliers in the hidden states of both, on at most eight batches at equal distances. The models take turns, and
    the time is the median of nine passes. The peak of the memory is told on CUDA alone. The 8-bit ranges of
    --in-8-bits come from as many more rows of the data, behind the ones that are measured. --recall tells what a
    passage of the rows gains when it is read again after 64, 200, 512 and 2048 tokens, as far as the rows and the
    models are long enough.
    """
    from hf_attn_swap.analysis.cost import beside
    from hf_attn_swap.analysis.outliers import outliers
    from hf_attn_swap.conversion.outcome import in_words
    from hf_attn_swap.measuring.held_out import HeldOut
    from hf_attn_swap.measuring.recall import Passages
    from hf_attn_swap.quantization import lost_in_8_bits
    from hf_attn_swap.text.finite import finite

    models = [_load(name, task, quiet, device=device, dtype=dtype, token=token) for name in (first, second)]
    where = (models[0], first, data, columns(column))
    batches = _batches(*where, label, config, split, stream, rows, length, token=token)
    ranges = _batches(*where, None, config, split, stream, rows, length, token=token, skipped=rows) if bits else []
    if bits and not ranges:
        raise ValueError("--in-8-bits: no rows are left for the 8-bit ranges; measure fewer with --rows.")
    passages = Passages.of(models[0], batches) if recalled else None  # refused now, and not after the measurements
    held = HeldOut(models[0], batches, as_it_is=True)
    found = held.lost(models[1], progress=True)
    if label is not None and found.accuracy is None and found.correlation is None:
        raise ValueError(f"--label {label}: this model's outputs are not compared with labels; leave out --label.")
    few = [kept.batch for kept in held.part(FEW).kept]
    costs, ratio = beside(models[0], models[1], few)
    states = [outliers(model, few) for model in models]
    rounded = [lost_in_8_bits(model, ranges, held) for model in models] if bits else []
    recalls = [] if passages is None else [passages.measure(model, progress=True) for model in models]
    if as_json:
        more = {"loss": found.share, "measure": found.measure, "time_ratio": ratio}
        both = dict(zip(("first", "second"), map(_figures, costs, states), strict=True))
        for figures, each in zip(both.values(), rounded, strict=False):
            figures["loss_in_8_bits"] = each.share
        for figures, gains in zip(both.values(), recalls, strict=False):
            figures["recall"] = gains.to_dict()
        print(json.dumps(finite({**found.to_dict(), **more, **both}), indent=1))
        return
    print(f"{second} beside {first}, {sum(map(_rows, batches))} rows of {data}")
    print(found)
    show(_table(costs, states, ratio))
    _show_largest(states, _words(models[0], first, few, token))
    if bits:
        own, other = map(in_words, rounded)
        print(f"In 8 bits, beside the first model in full precision: {own} lost by the first, {other} by the second.")
    if recalls:
        show(_recall_table(*recalls))
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
    length: Length = 512,
    task: Task = None,
    device: Device = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure one saved model: perplexity, a classifier's accuracy, or a regression's rank correlation (Spearman)."""
    from hf_attn_swap.measuring.held_out import HeldOut
    from hf_attn_swap.text.finite import finite

    loaded = _load(model, task, quiet, device=device, dtype=dtype, revision=revision, token=token)
    batches = _batches(
        loaded, model, data, columns(column), label, config, split, stream, rows, length, revision=revision, token=token
    )
    found = HeldOut(loaded, batches, as_it_is=True).itself()
    figures = {"perplexity": found.perplexity, "accuracy": found.accuracy, "spearmanr": found.correlation}
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


def _batches(
    model: Any,
    name: str,
    data: str,
    names: list[str],
    label: str | None,
    config: str | None,
    split: str | None,
    stream: bool | None,
    rows: int,
    length: int,
    *,
    revision: str | None = None,
    token: str | None = None,
    skipped: int = 0,
) -> list[dict[str, Any]]:
    """The first rows of the data, behind the skipped ones, as the model takes them, in batches. No more is read."""
    from hf_attn_swap.conversion.rows import as_rows
    from hf_attn_swap.measuring.lost import predicts_next
    from hf_attn_swap.publish.checkpoint import hub_arguments, processor_of
    from hf_attn_swap.training.data import column_names, filled_rows, open_rows

    found = open_rows(data, config, split, names, stream=stream, in_order=True)
    if label is not None and label not in (there := column_names(found)):
        raise ValueError(f"the data have no column {label!r}; they have {', '.join(there)}.")
    joined = predicts_next(model)
    if label is not None and joined:
        raise ValueError("a language model has no use for --label: its rows are blocks of joined text.")
    processor = processor_of(model, name, hub_arguments(revision, token))
    count = skipped + rows
    given: Any = filled_rows(found, names, label)
    labels: list[Any] = []
    if not joined:
        given = list(itertools.islice(given, count))
    if label is not None:
        given, labels = map(list, zip(*given, strict=True))
    prepared = as_rows(model, given, processor, length=length, most=count * length)
    chosen = [prepared.rows[place] for place in range(skipped, min(count, len(prepared)))]
    for row, value in zip(chosen, labels, strict=False):
        row["labels"] = value
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


def _rows(batch: dict[str, Any]) -> int:
    """The number of rows of a batch."""
    return len(next(iter(batch.values())))


def _figures(cost: Cost, found: Outliers | None) -> dict[str, Any]:
    """The cost and the outliers of one model as plain data; None stands for a figure that was not measured."""
    from hf_attn_swap.text.finite import finite

    measured = {} if found is None else asdict(found)
    return {**asdict(cost), **{name: finite(measured.get(name)) for name in ("kurtosis", "max_inf_norm", "largest")}}


def _words(model: Any, name: str, batches: Sequence[dict[str, Any]], token: str | None) -> dict[int, str]:
    """The texts of the tokens of some batches, by their ids; none for a model of images."""
    from hf_attn_swap.analysis.inputs import words_of
    from hf_attn_swap.publish.checkpoint import hub_arguments, processor_of

    if model.main_input_name != "input_ids":
        return {}
    return words_of(processor_of(model, name, hub_arguments(None, token)), batches)


def _show_largest(states: Sequence[Outliers | None], words: dict[int, str]) -> None:
    """Print the largest activation of each model, its layer and its token."""
    for name, found in zip(("first", "second"), states, strict=True):
        if found is not None:
            layer = max(range(len(found.largest)), key=lambda place: found.largest[place].value)
            print(f"The largest activation of the {name}, after layer {layer}: {found.largest[layer].of(words)}")


def _recall_table(first: Recall, second: Recall) -> Table:
    """What both models recall, by distance."""
    from hf_attn_swap.text.table import Table

    rows = [
        (
            f"{each:,}",
            *(f"{found.mean(each):.3f} ± {found.spread(each):.3f}" for found in (first, second)),
            f"{second.mean(each) / first.mean(each):.1%}" if first.mean(each) > 0 else "-",
        )
        for each in first.gains
    ]
    passages = len(next(iter(first.gains.values())))
    summary = f"Nats per token that a passage gains when it is read again: mean and spread of {passages} passages."
    return Table(summary=summary, header=("tokens between", "first", "second", "ratio"), rows=rows)


def _table(costs: Sequence[Cost], states: Sequence[Outliers | None], ratio: float) -> Table:
    """Time, memory and outliers of both models."""
    from hf_attn_swap.text.table import Table

    figures = list(map(_figures, costs, states))
    rows = []
    for name, key, unit in ROWS:
        first, second = (each[key] for each in figures)
        if first is not None and second is not None:
            over = ratio if key == "milliseconds" else second / first
            rows.append((name, f"{first / unit:.4g}", f"{second / unit:.4g}", f"{over:.2f}"))
    summary = "What a pass costs, and its outliers; the ratio is the second model's figure to the first's."
    return Table(summary=summary, header=("", "first", "second", "ratio"), rows=rows)
