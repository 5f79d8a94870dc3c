"""The command that converts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import Command, app, first_process, notify, show
from .options import Columns, Config, Data, Device, Dtype, Options, Overwrite, Revision, Task, Token, columns

MISSED = 1  # the exit code of a conversion that missed its budget


@app.command(cls=Command)
def convert(
    model: Annotated[str, typer.Argument(help="Name on the Hub, or folder, of a stock model.")],
    variant: Annotated[str, typer.Argument(help='Name from `variants`, or a composition such as "outeffhop+gated".')],
    out: Annotated[Path, typer.Argument(help="Folder for the converted model.")],
    data: Data,
    column: Columns = None,
    config: Config = None,
    split: Annotated[str | None, typer.Option(help="Split to convert on; train if left out.")] = None,
    eval_data: Annotated[str | None, typer.Option(help="Held-out data; a part of --data if left out.")] = None,
    tokens: Annotated[
        str, typer.Option(help="Budget of the distillation, such as 300k (patches, for images).")
    ] = "300k",
    max_loss: Annotated[
        str | None, typer.Option(help="Largest loss, such as 2%; the conversion stops when the loss is within.")
    ] = None,
    layers: Annotated[str, typer.Option(help='Layers, such as "0-5,7"; auto takes all, or as many as fit.')] = "auto",
    keep: Annotated[float, typer.Option(help="Share of layers that keep their attention: the costliest.")] = 0.0,
    absorb: Annotated[
        bool, typer.Option("--absorb/--no-absorb", help="Try one token as a sink, in a causal language model.")
    ] = True,
    option: Options = None,
    length: Annotated[int, typer.Option(min=2, help="Number of tokens of a row.")] = 256,
    low_memory: Annotated[
        bool, typer.Option("--low-memory", help="Slower, with less memory: adapters, and one row at a time.")
    ] = False,
    bf16: Annotated[
        bool,
        typer.Option(
            "--bf16", help="Compute the training's products in bf16, often faster; weights keep their precision."
        ),
    ] = False,
    task: Task = None,
    device: Device = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    push: Annotated[str | None, typer.Option(help="Publish the result there, such as me/smollm2-belief.")] = None,
    keep_anyway: Annotated[
        bool, typer.Option("--keep-anyway", help="Save the model, too, if its loss is above the budget.")
    ] = False,
    overwrite: Overwrite = False,
) -> None:
    """Convert a model with little loss: swap, fit, distil from the model itself, measure, and save.

    Labels are not read. The folder gets the model, its tokenizer, a card, results.json and conversion.html. The same
    command goes on with a conversion that was interrupted. If the loss is above --max-loss, nothing is saved and the
    exit code is 1. On several GPUs: accelerate launch -m hf_attn_swap.cli convert, with the same arguments.
    """
    from hf_attn_swap.publish.converted import convert_checkpoint
    from hf_attn_swap.publish.hub import push_folder
    from hf_attn_swap.text.typed import parse_count, parse_layers, parse_options, parse_share
    from hf_attn_swap.training.data import inputs_of, load_rows

    names = columns(column)

    def read() -> tuple[Sequence[Any], Sequence[Any] | None]:
        train = inputs_of(load_rows(data, config, split, names, ("train",)), names)
        if eval_data is None:
            return train, None
        return train, inputs_of(load_rows(eval_data, config, None, names), names)

    report, saved = convert_checkpoint(
        model,
        variant,
        out,
        read,
        data_name=Path(data).stem if Path(data).exists() else data,
        tokens=parse_count(tokens),
        max_loss=parse_share(max_loss),
        layers="auto" if layers == "auto" else parse_layers(layers) or [],
        keep=keep,
        absorb=absorb,
        options=parse_options(option or [], composed="+" in variant),
        length=length,
        low_memory=low_memory,
        bf16=bf16,
        task=task,
        device=device,
        dtype=dtype,
        revision=revision,
        token=token,
        keep_anyway=keep_anyway,
        overwrite=overwrite,
        notify=notify,
    )
    if not first_process():
        return
    show(report.table())
    for line in report.notes():
        print(line)
    if not saved:
        why = f"the loss ({report.lost.measure}) is above the budget" if report.layers else "no layer fits the budget"
        notify(f"nothing was saved: {why}; --keep-anyway saves a model with converted layers.")
        raise typer.Exit(MISSED)
    if push is not None:
        print(push_folder(out, push, token=token).commit_url)
    if not report.met:
        raise typer.Exit(MISSED)
