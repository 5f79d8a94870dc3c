"""The commands that measure saved models: evaluate and compare."""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import typer

from .app import app, notify

Model = Annotated[str, typer.Argument(help="Name on the Hub, or folder of a saved model, stock or converted.")]
Data = Annotated[str, typer.Option(help="Set on the Hub, folder, or file of text or images.")]
Column = Annotated[str, typer.Option(help="Column of the text or the image.")]
Label = Annotated[str | None, typer.Option(help="Column of the class (a number), for the accuracy of a classifier.")]
Config = Annotated[str | None, typer.Option(help="Configuration of the set, such as a GLUE task.")]
Split = Annotated[str | None, typer.Option(help="Split of the set; the held-out split if left out.")]
RowCount = Annotated[int, typer.Option(min=1, help="Number of rows, or blocks of text, from the first.")]
Length = Annotated[int, typer.Option(min=2, help="Number of tokens of a row.")]
Task = Annotated[str | None, typer.Option("--task", "--auto-class", help="As for `patch`.")]
Device = Annotated[str, typer.Option(help="Such as cpu or cuda.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def compare(
    first: Model,
    second: Model,
    data: Data,
    column: Column = "text",
    label: Label = None,
    config: Config = None,
    split: Split = None,
    rows: RowCount = 64,
    length: Length = 512,
    task: Task = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Compare two saved models, such as a converted model and its base, on the same rows.

    The first model is the one that the second is measured against: KL, equal first choices, perplexity or accuracy, and
    the time of a pass as a ratio.
    """
    from ..analysis.held_out import HeldOut

    models = [_load(name, task, device) for name in (first, second)]
    batches = _batches(models[0], first, data, column, label, config, split, rows, length)
    found = HeldOut(models[0], batches, as_it_is=True).lost(models[1], progress=True)
    ratio = _ratio(models[1], models[0], batches[:8])
    if as_json:
        more = {"loss": found.share, "measure": found.measure, "time_ratio": ratio}
        print(json.dumps({**found.to_dict(), **more}, indent=1))
        return
    print(f"{second} beside {first}, {sum(map(_rows, batches))} rows of {data}")
    print(found)
    print(f"Time of a pass (1 is the first model's): {ratio:.2f}")


@app.command()
def evaluate(
    model: Model,
    data: Data,
    column: Column = "text",
    label: Label = None,
    config: Config = None,
    split: Split = None,
    rows: RowCount = 64,
    length: Length = 512,
    task: Task = None,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure one saved model: the perplexity of a causal language model, the accuracy of a classifier."""
    from ..analysis.held_out import HeldOut

    loaded = _load(model, task, device)
    batches = _batches(loaded, model, data, column, label, config, split, rows, length)
    found = HeldOut(loaded, batches, as_it_is=True).itself()
    figures = {"perplexity": found.perplexity, "accuracy": found.accuracy}
    known = {name: value for name, value in figures.items() if value is not None}
    if not known:
        raise ValueError(
            "this model has neither a perplexity nor an accuracy here; name the classes of a classifier's rows with "
            "--label, or compare the model with another model (hf-attn-swap compare)."
        )
    print(json.dumps(known) if as_json else "\n".join(f"{name}: {value:.4g}" for name, value in known.items()))


def _load(name: str, task: str | None, device: str) -> Any:
    """A saved model in evaluation mode."""
    from ..publish.checkpoint import model_class, read_config

    notify(f"loading {name}")
    return model_class(read_config(name), task).from_pretrained(name).to(device).eval()


def _batches(
    model: Any,
    name: str,
    data: str,
    column: str,
    label: str | None,
    config: str | None,
    split: str | None,
    rows: int,
    length: int,
) -> list[dict[str, Any]]:
    """The first rows of the data as the model takes them, in batches."""
    from ..conversion.rows import as_rows
    from ..publish.converted import processor_of
    from ..training import load_rows

    found = load_rows(data, config, split, column)
    if label is not None and label not in found.column_names:
        raise ValueError(f"the data have no column {label!r}; they have {', '.join(found.column_names)}.")
    filled = found.filter(lambda row: not isinstance(row[column], str) or bool(row[column].strip()))
    if not len(filled):
        raise ValueError(f"every row of column {column!r} is blank.")
    prepared = as_rows(model, filled[column][:], processor_of(model, name, {}), length=length)
    if label is not None:
        if len(prepared) != len(filled):
            raise ValueError("a language model has no use for --label: its rows are blocks of joined text.")
        for row, value in zip(prepared.rows, filled[label], strict=True):
            row["labels"] = value
    return list(prepared.some(range(min(rows, len(prepared)))).batches(8))


def _rows(batch: dict[str, Any]) -> int:
    """The number of rows of a batch."""
    return len(next(iter(batch.values())))


def _ratio(ours: Any, theirs: Any, batches: list[dict[str, Any]]) -> float:
    """The time of `ours` as a multiple of that of `theirs`: the median over batches, both models in turn."""
    from statistics import median

    from ..conversion.batches import forward, without_labels

    found = []
    for batch in [batches[0], *batches]:
        times = []
        for model in (ours, theirs):
            start = time.perf_counter()
            forward(model, without_labels(batch))
            times.append(time.perf_counter() - start)
        found.append(times[0] / times[1])
    return median(found[1:])
