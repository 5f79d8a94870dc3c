"""The commands that convert a model, and round it to 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .app import Command, app, first_process, notify, told
from .options import (
    LENGTH,
    Columns,
    Config,
    Data,
    Device,
    Dtype,
    Options,
    Overwrite,
    Quiet,
    Revision,
    Stream,
    Task,
    Token,
    Tokenizer,
    columns,
)

MISSED = 1  # the exit code of a conversion that missed its budget

Stock = Annotated[str, typer.Argument(help="Name on the Hub, or folder, of a stock model.")]
Train = Annotated[str | None, typer.Option(help="Split to work on; train if left out.")]
HeldOut = Annotated[str | None, typer.Option(help="Held-out data; a part of --data if left out.")]
HeldOutTokens = Annotated[
    str | None, typer.Option(help="What is read of --eval-data at most, such as 100k; 32,768 tokens if left out.")
]
Loss = Annotated[
    str | None, typer.Option(help="Largest loss, such as 2%: training stops within it, and a larger loss is not saved.")
]
Length = Annotated[int, typer.Option(min=2, help="Number of tokens of a row.")]
Push = Annotated[str | None, typer.Option(help="Publish the result there, such as me/smollm2-belief.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Convert nothing: only count the weights, and what trains.")]
Anyway = Annotated[bool, typer.Option("--keep-anyway", help="Save the model, too, if its loss is above the budget.")]
Base = Annotated[
    str | None, typer.Option("--base-model", help="Name of the model on the Hub, for the card, if MODEL is a folder.")
]


@app.command(cls=Command)
def convert(
    model: Stock,
    variant: Annotated[str, typer.Argument(help='Name from `variants`, or a composition such as "outeffhop+gated".')],
    out: Annotated[Path, typer.Argument(help="Folder for the converted model.")],
    data: Data,
    column: Columns = None,
    config: Config = None,
    split: Train = None,
    stream: Stream = None,
    eval_data: HeldOut = None,
    eval_tokens: HeldOutTokens = None,
    tokens: Annotated[
        str, typer.Option(help="Budget of the distillation, such as 300k (patches, for images). 0 trains nothing.")
    ] = "300k",
    max_loss: Loss = None,
    min_recall: Annotated[
        str | None, typer.Option(help="Smallest recall of a language model, such as 97% of the stock model's.")
    ] = None,
    recall_distance: Annotated[
        int | None, typer.Option(min=1, help="Tokens after which recall is measured; 200 if left out.")
    ] = None,
    layers: Annotated[str, typer.Option(help='Layers, such as "0-5,7"; auto takes all, or as many as fit.')] = "auto",
    heads: Annotated[
        str | None, typer.Option(help="auto: choose key/value heads in place of layers, for a window.")
    ] = None,
    keep: Annotated[
        float, typer.Option(help="Share of layers, or of heads, that keep their attention: the costliest.")
    ] = 0.0,
    fit: Annotated[str, typer.Option(help="auto, gain or map: what is fitted per head; none fits nothing.")] = "auto",
    absorb: Annotated[
        bool, typer.Option("--absorb/--no-absorb", help="Try one token as a sink, in a causal language model.")
    ] = True,
    option: Options = None,
    target: Annotated[
        str | None, typer.Option(help="engine: the form that `export` writes for vLLM and llama.cpp.")
    ] = None,
    length: Length = LENGTH,
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
    tokenizer: Tokenizer = None,
    device: Device = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    base_model: Base = None,
    push: Push = None,
    keep_anyway: Anyway = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> None:
    """Convert a model to another attention with little loss. Swap, fit, distil, measure, and save.

    Labels are not read. The folder gets the model, its tokenizer, a card, results.json and conversion.html. The same
    command goes on with a conversion that was interrupted. If the loss is above --max-loss, or recall below
    --min-recall, nothing is saved and the exit code is 1. On several GPUs: accelerate launch --multi_gpu -m
    hf_attn_swap_cli convert, with the same arguments; a training step of n processes then reads n times the rows.
    """
    _convert_or_plan(locals())


@app.command(cls=Command)
def quantize(
    model: Stock,
    out: Annotated[Path, typer.Argument(help="Folder for the model in 8-bit integers.")],
    data: Data,
    variant: Annotated[
        str | None, typer.Option(help='Such as "outeffhop"; if left out, stock attention, with a sink where it helps.')
    ] = None,
    column: Columns = None,
    config: Config = None,
    split: Train = None,
    stream: Stream = None,
    eval_data: HeldOut = None,
    eval_tokens: HeldOutTokens = None,
    tokens: Annotated[
        str,
        typer.Option(help="Budget of a training with rounding, such as 20k; half is for --variant. 0 trains nothing."),
    ] = "0",
    max_loss: Loss = None,
    option: Options = None,
    length: Length = 512,
    inputs: Annotated[
        str, typer.Option(help="static: one fitted range for the inputs of each matrix; dynamic: a range per token.")
    ] = "static",
    task: Task = None,
    tokenizer: Tokenizer = None,
    device: Device = None,
    dtype: Dtype = "float32",
    revision: Revision = None,
    token: Token = None,
    base_model: Base = None,
    push: Push = None,
    keep_anyway: Anyway = False,
    overwrite: Overwrite = False,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> None:
    """Round a model to 8-bit integers with little loss. Sink, smoothed channels, static ranges; measure, and save.

    Nothing is trained unless --tokens says so. The table has the loss of the stock model in the same 8 bits, and of
    each step. The folder gets the model, its tokenizer, a card, results.json and conversion.html. On several GPUs:
    accelerate launch --multi_gpu -m hf_attn_swap_cli quantize, with the same arguments.
    """
    _convert_or_plan({**locals(), "quantized": True})


def _convert_or_plan(parameters: dict[str, Any]) -> None:
    """Run a command with these parameters, or with --dry-run count what it would train."""
    if not parameters.pop("dry_run"):
        run_conversion(**parameters)
        return
    from .dry_run import dry_run

    print(dry_run(**parameters).text())


def run_conversion(
    *,
    model: str,
    variant: str | None,
    out: Path,
    data: str,
    eval_data: str | None,
    eval_tokens: str | None,
    stream: bool | None,
    column: list[str] | None,
    config: str | None,
    split: str | None,
    tokens: str,
    max_loss: str | None,
    option: list[str] | None,
    push: str | None,
    token: str | None,
    quiet: bool,
    layers: str = "auto",
    min_recall: str | None = None,
    fit: str = "auto",
    quantized: bool = False,
    **more: Any,
) -> None:
    """Convert or quantize a checkpoint, print the report, and publish the result if that was asked for."""
    from hf_attn_swap.publish.converted import convert_checkpoint
    from hf_attn_swap.publish.hub import push_folder
    from hf_attn_swap.text.typed import parse_count, parse_layers, parse_options, parse_share
    from hf_attn_swap.training.data import inputs_of, open_rows

    names = columns(column)

    def read() -> tuple[Any, Any]:
        train = open_rows(data, config, split, names, ("train",), stream=stream)
        if eval_data is None:
            return inputs_of(train, names), None
        held = open_rows(eval_data, config, None, names, stream=stream)
        used, measured = (str(rows.split).partition("[")[0] for rows in (train, held))
        if used == measured and Path(data).resolve() == Path(eval_data).resolve():
            raise ValueError(
                f"--eval-data {eval_data}: its held-out rows would be those of the split {used!r}, which the "
                "conversion works on; name other data, or leave out --eval-data, and a part of --data is held out."
            )
        return inputs_of(train, names), inputs_of(held, names)

    if not quantized:
        more["layers"] = "auto" if layers == "auto" else parse_layers(layers) or []
        more |= {"min_recall": parse_share(min_recall), "fit": None if fit == "none" else fit}
    report, saved = convert_checkpoint(
        model,
        variant,
        out,
        read,
        data_name=Path(data).stem if Path(data).exists() else data,
        tokens=parse_count(tokens),
        eval_tokens=None if eval_tokens is None else parse_count(eval_tokens),
        max_loss=parse_share(max_loss),
        quantized=quantized,
        options=parse_options(option or [], composed="+" in (variant or "")),
        token=token,
        notify=told(quiet),
        quiet=quiet,
        **more,
    )
    if not first_process():
        return
    print(report.table().text())
    for line in report.notes():
        print(line)
    if not saved:
        why = "no layer fits the budget"
        if report.layers:
            missed = f"the loss ({report.lost.measure}) is above the budget"
            why = missed if report.min_recall is None else f"the budget of {report.budget} was missed"
        notify(f"nothing was saved: {why}; --keep-anyway saves a model with converted layers.")
        raise typer.Exit(MISSED)
    if push is not None:
        print(push_folder(out, push, token=token).commit_url)
    if not report.met:
        raise typer.Exit(MISSED)
