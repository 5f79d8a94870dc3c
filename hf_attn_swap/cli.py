"""The command line `hf-attn-swap`: list the variants, convert a checkpoint, describe one, run the demo.

What a user got wrong is one line on stderr, `error: ...`, with exit code 2; `--debug` shows the traceback.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import warnings
from pathlib import Path
from typing import Annotated

import huggingface_hub
import transformers
import typer
from rich.console import Console
from rich.table import Table

from . import __version__, describe, list_variants
from .arguments import parse_layers, parse_options
from .card import render, table
from .demo.options import DEFAULT_VARIANTS, DemoOptions
from .hub import push_folder
from .registry import get_variant
from .results import RunResult

WIDE = 160  # columns of a table that goes to a file or a pipe
USAGE_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="hf-attn-swap",
    help="Swap the attention of a loaded pretrained Transformers model, exactly.",
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line; the console script."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return the exit code, after turning errors into one line."""
    try:
        with warnings.catch_warnings():
            _quiet()
            return int(app(args=arguments, standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # the outermost boundary: whatever it is, a user gets one line
        if "--debug" in arguments:
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return USAGE_ERROR


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Swap the attention of a loaded pretrained Transformers model, exactly."""
    if version:
        print(f"hf-attn-swap {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


@app.command()
def variants() -> None:
    """List the variants: name, options with their defaults, what changes, paper."""
    table = Table("name", "options", "what it changes", "adds", "paper", show_lines=True)
    for name in list_variants():
        variant = get_variant(name)
        options = ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(variant.Options))
        table.add_row(name, options or "-", variant.summary, variant.parameters_added, variant.paper)
    _console().print(table)
    print('Variants that touch different places compose with "+", as in outeffhop+gated.')


@app.command()
def patch(
    model: Annotated[str, typer.Argument(help="Name on the Hub, or folder of a saved model.")],
    variant: Annotated[str, typer.Argument(help='Name from `variants`, or a composition such as "mha+belief".')],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    strength: Annotated[float, typer.Option(help="0 is the pretrained model, 1 the paper's formula.")] = 1.0,
    layers: Annotated[
        str | None, typer.Option(help='Which self-attention layers, as "0-5,7"; all if left out.')
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="key=value; component.key=value in a composition.")
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            "--task",
            "--auto-class",
            help="AutoModel class, as AutoModelForCausalLM or causal-lm; by default the class that was saved.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Write into a folder that is not empty.")] = False,
) -> None:
    """Load a pretrained model, swap its attention, and save it with its tokenizer or image processor."""
    from .checkpoint import convert

    fresh = convert(
        model,
        variant,
        out,
        strength=strength,
        layers=parse_layers(layers),
        options=parse_options(option or [], composed="+" in variant),
        task=task,
        overwrite=overwrite,
        notify=_notify,
    )
    if fresh:
        _notify(f"note: not in the checkpoint, so newly initialised: {', '.join(fresh)}")


@app.command(name="describe")
def describe_command(
    model: Annotated[str, typer.Argument(help="Name on the Hub, or folder of a saved model.")],
    task: Annotated[str | None, typer.Option("--task", "--auto-class", help="As for `patch`.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what is swapped in a saved model, or what could be in a stock one; reads the config, not the weights."""
    from .checkpoint import skeleton

    _notify(f"reading the config of {model}")
    description = describe(skeleton(model, task))
    print(json.dumps(description.to_dict(), indent=2) if as_json else description)
    layers = [row.layer for row in description.rows if row.layer is not None]
    if layers and not as_json and all(row.strength is None for row in description.rows):
        print(f"Layers 0 to {layers[-1]} can be swapped: hf-attn-swap patch {model} VARIANT OUT")


@app.command()
def demo(
    variants: Annotated[str, typer.Option(help="Comma-separated; the control is always there.")] = ",".join(
        DEFAULT_VARIANTS
    ),
    model: Annotated[str | None, typer.Option(help="Hub name or folder; by default the extra's MiniLM.")] = None,
    dataset: Annotated[str | None, typer.Option(help="Hub name or folder; by default rotten_tomatoes.")] = None,
    text_column: Annotated[str, typer.Option(help="Column of --dataset with the text.")] = "text",
    label_column: Annotated[str, typer.Option(help="Column of --dataset with the class.")] = "label",
    train_size: Annotated[int, typer.Option(help="Sentences to train on.")] = DemoOptions.train_size,
    test_size: Annotated[int, typer.Option(help="Sentences held out.")] = DemoOptions.test_size,
    batch_size: Annotated[int, typer.Option(help="Sentences per step.")] = DemoOptions.batch_size,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = DemoOptions.learning_rate,
    max_length: Annotated[int, typer.Option(help="Tokens kept of a sentence.")] = DemoOptions.max_length,
    ramp: Annotated[float, typer.Option(help="Share of the steps in which strength rises.")] = DemoOptions.ramp,
    seed: Annotated[int, typer.Option(help="The same for every model.")] = DemoOptions.seed,
    out: Annotated[Path, typer.Option(help="Folder to write.")] = DemoOptions.out,
) -> None:
    """Fine-tune a pretrained BERT with several attentions on real text, compare them, save and reload the best."""
    options = DemoOptions(
        variants=tuple(name.strip() for name in variants.split(",") if name.strip()),
        model=model,
        dataset=dataset,
        text_column=text_column,
        label_column=label_column,
        train_size=train_size,
        test_size=test_size,
        batch_size=batch_size,
        learning_rate=learning_rate,
        max_length=max_length,
        ramp=ramp,
        seed=seed,
        out=out,
    )
    from .demo.run import run_demo

    transformers.utils.logging.disable_progress_bar()  # six bars of a loading that takes no time
    run_demo(options, _console())


@app.command()
def card(
    results: Annotated[Path, typer.Argument(help="A results.json.")],
    out: Annotated[Path | None, typer.Option(help="Where to write it; printed if left out.")] = None,
    repo: Annotated[str | None, typer.Option(help="Name on the Hub, for the lines that load it.")] = None,
) -> None:
    """Render the model card of a run from its results.json alone."""
    text = render(RunResult.load(results), repo)
    print(text) if out is None else out.write_text(text, encoding="utf-8")


@app.command()
def push(
    folder: Annotated[Path, typer.Argument(help="Folder of a saved converted model.")],
    repo: Annotated[str, typer.Argument(help="Name on the Hub, as me/bert-belief.")],
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch.")] = None,
) -> None:
    """Publish a saved model with its card, in one commit; a results.json in the folder becomes the card."""
    _notify(f"pushing {folder} to {repo}")
    print(push_folder(folder, repo, private=private, revision=revision).commit_url)


@app.command(name="table")
def table_command(folder: Annotated[Path, typer.Argument(help="Folder of runs, as model_cards/.")]) -> None:
    """One Markdown table of all runs in a folder."""
    print(table(folder))


def _one_line(error: Exception) -> str:
    """The message of an error; its type too where the message would not do alone."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = " ".join(message.split())
    told = isinstance(error, (ValueError, OSError, ImportError, RuntimeError)) or hasattr(error, "format_message")
    return (
        message
        if told and message
        else f"{type(error).__name__}: {message} (run again with --debug before the command)"
    )


def _notify(message: str) -> None:
    print(message, file=sys.stderr)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDE)


def _quiet() -> None:
    """Keep the libraries' own reports off the terminal, and each of our warnings in one line."""
    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module=r"(transformers|torch|huggingface_hub|accelerate)\b")
    warnings.showwarning = lambda message, *_, **__: _notify(f"warning: {message}")


if __name__ == "__main__":
    main()
