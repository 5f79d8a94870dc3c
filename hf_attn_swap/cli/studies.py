"""The commands that measure: demo, report, dynamics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import transformers
import typer

from ..core.typed import parse_options
from ..demo.data import require_packages
from ..demo.options import DEFAULT_VARIANTS, DemoOptions
from .app import app, notify


@app.command()
def demo(
    variants: Annotated[str, typer.Option(help="Names, separated by commas; the first is saved.")] = ",".join(
        DEFAULT_VARIANTS
    ),
    model: Annotated[str | None, typer.Option(help="Hub name or folder; by default the extra's MiniLM.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Hub name or folder; by default rotten_tomatoes.")] = None,
    config: Annotated[str | None, typer.Option(help="Configuration of --dataset, such as a GLUE task.")] = None,
    text_column: Annotated[str, typer.Option(help="Column of --dataset with the text.")] = DemoOptions.text_column,
    label_column: Annotated[str, typer.Option(help="Column of --dataset with the class.")] = DemoOptions.label_column,
    test_split: Annotated[str, typer.Option(help="Split of --dataset to measure on.")] = DemoOptions.test_split,
    train_size: Annotated[int, typer.Option(help="Number of sentences to fine-tune on.")] = DemoOptions.train_size,
    test_size: Annotated[int, typer.Option(help="Number of held-out sentences.")] = DemoOptions.test_size,
    tokens: Annotated[int, typer.Option(help="Budget of each conversion, in tokens.")] = DemoOptions.tokens,
    max_loss: Annotated[
        float | None, typer.Option(help="Largest loss, as a share; the budget then chooses the layers.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sentences per step of the fine-tuning.")] = DemoOptions.batch_size,
    learning_rate: Annotated[
        float, typer.Option(help="Peak learning rate of the fine-tuning.")
    ] = DemoOptions.learning_rate,
    max_length: Annotated[
        int, typer.Option(help="Number of tokens that are kept of a sentence.")
    ] = DemoOptions.max_length,
    seed: Annotated[int, typer.Option(help="Seed of the sample and of the fine-tuning.")] = DemoOptions.seed,
    out: Annotated[Path, typer.Option(help="Folder for the result.")] = DemoOptions.out,
) -> None:
    """Fine-tune a pretrained BERT on real text, convert it to several attentions, compare them, save and reload one."""
    options = DemoOptions(
        variants=tuple(name.strip() for name in variants.split(",") if name.strip()),
        model=model,
        dataset=dataset,
        config=config,
        text_column=text_column,
        label_column=label_column,
        test_split=test_split,
        train_size=train_size,
        test_size=test_size,
        tokens=tokens,
        max_loss=max_loss,
        batch_size=batch_size,
        learning_rate=learning_rate,
        max_length=max_length,
        seed=seed,
        out=out,
    )
    require_packages(options)  # before the import, which needs them
    from ..demo.run import run_demo

    transformers.utils.logging.disable_progress_bar()  # loading takes a moment and would draw a bar per model
    run_demo(options)


@app.command()
def report(
    model: Annotated[str, typer.Argument(help="Name on the Hub, or folder of a saved model, stock or swapped.")],
    data: Annotated[str, typer.Option(help="Set on the Hub, folder, or file of text or images.")],
    variant: Annotated[str | None, typer.Option(help="Variant to swap into a stock model, as for `patch`.")] = None,
    option: Annotated[list[str] | None, typer.Option("--option", "-o", help="As for `patch`.")] = None,
    calibrate: Annotated[str | None, typer.Option(help='"gain" or "map": fit the swap on the rows first.')] = None,
    column: Annotated[str, typer.Option(help="Column of the text or the image.")] = "text",
    config: Annotated[str | None, typer.Option(help="Configuration of the set, such as a GLUE task.")] = None,
    split: Annotated[str | None, typer.Option(help="Split of the set; the held-out split if left out.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows, from the first.")] = 64,
    show: Annotated[int, typer.Option(help="Row whose attention is drawn, from 0.")] = 0,
    max_length: Annotated[int, typer.Option(min=2, help="Number of tokens that are kept of a row.")] = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of rows per batch.")] = 16,
    task: Annotated[str | None, typer.Option("--task", "--auto-class", help="As for `patch`.")] = None,
    processor: Annotated[str | None, typer.Option(help="Tokenizer or image processor, if not the model's.")] = None,
    base: Annotated[
        str | None, typer.Option(help="The stock model, to say what was lost; the model at strength 0 if left out.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder to write report.html and report.json into.")] = Path("report"),
) -> None:
    """Report what a swap does to a model, beside the unswapped model: outliers, similarity, entropy, attention maps."""
    from ..analysis.comparison import compare
    from ..analysis.inputs import prepare
    from ..publish.checkpoint import model_class, read_config
    from ..training import load_rows

    chosen = parse_options(option or [], composed="+" in (variant or ""))
    found = load_rows(data, config, split, column)
    loaded = model_class(read_config(model), task).from_pretrained(model)
    inputs = prepare(
        loaded, processor or model, found, column, limit=rows, batch_size=batch_size, max_length=max_length, shown=show
    )
    stock = None if base is None else model_class(read_config(base), task).from_pretrained(base)
    made = compare(loaded, inputs, Path(data).name, variant, fit=calibrate, stock=stock, **chosen)
    if made.lost is not None:
        print(made.lost)
    for note in made.notes:
        notify(f"note: {note}")
    print(made.save(out))


@app.command()
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
    """Draw the figures of the clusters paper and of the multi-head report: attention as a system of particles."""
    from transformers import AutoModel, AutoTokenizer

    from ..dynamics.figures import FIGURES, TRAINED, Settings

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
        for path in drawn.save(out, name):
            print(f"  {path}")
