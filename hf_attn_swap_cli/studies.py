"""The commands that measure: demo, report, dynamics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .app import Command, app, told
from .options import (
    LENGTH,
    Columns,
    Config,
    Data,
    Device,
    Dtype,
    Length,
    Model,
    Options,
    Quiet,
    Revision,
    Split,
    Stream,
    Task,
    Token,
    Tokenizer,
    columns,
)


@app.command(cls=Command)
def demo(
    variants: Annotated[
        str, typer.Option(help="Names, separated by commas; the first is saved.")
    ] = "belief,modern_hopfield,simpletron_resl",
    train_size: Annotated[int, typer.Option(min=1, help="Number of sentences to fine-tune on.")] = 1600,
    test_size: Annotated[int, typer.Option(min=1, help="Number of held-out sentences.")] = 1000,
    tokens: Annotated[int, typer.Option(min=0, help="Budget of each conversion, in tokens.")] = 32_000,
    max_loss: Annotated[
        float | None, typer.Option(help="Largest loss, as a share; the budget then chooses the layers.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the sample and of the fine-tuning.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the result.")] = Path("attn-swap-demo"),
    quiet: Quiet = False,  # read by `Command`
) -> None:
    """Show a conversion. Fine-tune a pretrained BERT on real text, convert it to several attentions, compare them."""
    import transformers

    from hf_attn_swap.demo import packaged_model, packaged_rows, run_demo

    transformers.utils.logging.disable_progress_bar()  # loading takes a moment and would draw a bar per model
    run_demo(
        packaged_model(),
        packaged_rows(),
        variants=[name.strip() for name in variants.split(",") if name.strip()],
        train_size=train_size,
        test_size=test_size,
        tokens=tokens,
        max_loss=max_loss,
        seed=seed,
        out=out,
    )


@app.command(cls=Command)
def report(
    model: Model,
    data: Data,
    variant: Annotated[str | None, typer.Option(help="Variant to swap into a stock model, as for `patch`.")] = None,
    option: Options = None,
    column: Columns = None,
    config: Config = None,
    split: Split = None,
    stream: Stream = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows, from the first.")] = 64,
    length: Length = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of rows per batch.")] = 16,
    task: Task = None,
    device: Device = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    tokenizer: Tokenizer = None,
    base: Annotated[
        str | None, typer.Option(help="The stock model, to say what was lost; the model at strength 0 if left out.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write report.html and report.json into.")] = Path("report"),
    quiet: Quiet = False,
) -> None:
    """Report what a swap does to a model, beside the unswapped model. Outliers, similarity of tokens, entropy."""
    from hf_attn_swap.analysis.comparison import compare
    from hf_attn_swap.analysis.inputs import prepare
    from hf_attn_swap.measuring.batches import check_length, usual_length
    from hf_attn_swap.publish.checkpoint import hub_arguments, load_checkpoint, other_processor
    from hf_attn_swap.text.typed import parse_options
    from hf_attn_swap.training.data import open_rows
    from hf_attn_swap.writing import check_writable, told_where

    check_writable(out)
    chosen = parse_options(option or [], composed="+" in (variant or ""))
    names = columns(column)
    source = open_rows(data, config, split, names, stream=stream, in_order=True)
    loaded = load_checkpoint(model, task, device=device, dtype=dtype, revision=revision, token=token)
    if tokenizer is not None:
        other_processor(loaded, tokenizer, hub_arguments(None, token))  # refused now, if it has other tokens
    inputs = prepare(
        loaded,
        tokenizer or model,
        source,
        names,
        limit=rows,
        batch_size=batch_size,
        max_length=length or usual_length([loaded], LENGTH),
        hub=hub_arguments(revision if tokenizer is None else None, token),
    )
    check_length(loaded, inputs.batches)
    stock = None if base is None else load_checkpoint(base, task, device=device, dtype=dtype, token=token)
    made = compare(loaded, inputs, Path(data).name, variant, stock=stock, **chosen)
    if made.lost is not None:
        print(made.lost)
    for note in made.notes:
        told(quiet)(f"note: {note}")
    with told_where(out):
        print(made.save(out))


@app.command(cls=Command)
def dynamics(
    figure: Annotated[str, typer.Argument(help='A figure, "all", or "list".')] = "list",
    model: Annotated[
        str | None, typer.Option(help="Name on the Hub, or folder, for the figures of trained heads.")
    ] = None,
    layer: Annotated[int, typer.Option(help="Self-attention layer, from 0.")] = 0,
    head: Annotated[int, typer.Option(help="Head of the single-head figures, from 0.")] = 4,
    text: Annotated[Path | None, typer.Option(help="File with the paragraph to embed.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the initial tokens and random matrices.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder to write PNG and GIF files into.")] = Path("dynamics"),
) -> None:
    """Draw tokens as particles. These are the figures of the clusters paper and of the multi-head report."""
    from transformers import AutoModel, AutoTokenizer

    from hf_attn_swap.dynamics.figures import FIGURES, TRAINED, Settings
    from hf_attn_swap.writing import check_writable, told_where

    if figure == "list":
        for name, draw in FIGURES.items():
            print(f"{name:24}{(draw.__doc__ or '').strip()}{' (needs --model)' if name in TRAINED else ''}")
        return
    unusable: set[str] = set()
    if model is None:
        unusable = TRAINED
    elif text is None:
        unusable = {"paragraph"}
    chosen = [name for name in FIGURES if name not in unusable] if figure == "all" else [figure]
    if unknown := [name for name in chosen if name not in FIGURES]:
        raise ValueError(f"unknown figure {unknown[0]!r}; known: {', '.join(FIGURES)}.")
    if missing := [name for name in chosen if name in unusable]:
        raise ValueError(f"{missing[0]} needs {'--model' if model is None else '--text'}.")
    check_writable(out)
    settings = Settings(
        seed=seed,
        layer=layer,
        head=head,
        model=None if model is None else AutoModel.from_pretrained(model),
        tokenizer=None if model is None or text is None else AutoTokenizer.from_pretrained(model),
        text="" if text is None else text.read_text(encoding="utf-8"),
    )
    for name in chosen:
        drawn = FIGURES[name](settings)
        print(f"{name}: {drawn.says}")
        with told_where(out):
            for path in drawn.save(out, name):
                print(f"  {path}")
