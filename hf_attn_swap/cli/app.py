"""The command-line application: runs a command, and turns an error into one line."""

from __future__ import annotations

import sys
import warnings
from typing import Annotated

import huggingface_hub
import transformers
import typer
from rich.console import Console

from .. import __version__

WIDE = 160  # columns of a table that is written to a file or a pipe
USAGE_ERROR = 2
INTERRUPTED = 130

app = typer.Typer(
    name="hf-attn-swap",
    help="Swap the attention of a loaded pretrained Transformers model, exactly.",
    add_completion=False,
    rich_markup_mode=None,
)


def main() -> None:
    """Run the command line. The console script calls this function."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return the exit code. An error is printed as one line."""
    try:
        with warnings.catch_warnings():
            _quiet()
            return int(app(args=arguments, standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:  # the outermost boundary: the user gets one line for every error
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


def _one_line(error: Exception) -> str:
    """The message of an error; with its type if the message alone would not tell the user enough."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = " ".join(message.split())
    if isinstance(error, ModuleNotFoundError):
        message += '; pip install "hf-attn-swap[all]" brings what the commands need'
    told = isinstance(error, (ValueError, OSError, ImportError, RuntimeError)) or hasattr(error, "format_message")
    return (
        message
        if told and message
        else f"{type(error).__name__}: {message} (run again with --debug before the command)"
    )


def notify(message: str) -> None:
    """Print one line on stderr."""
    print(message, file=sys.stderr)


def console() -> Console:
    """A console as wide as the terminal, or 160 columns wide for a file or a pipe."""
    found = Console()
    return found if found.is_terminal else Console(width=WIDE)


def _quiet() -> None:
    """Hide the messages of the libraries, and print each warning of this package in one line."""
    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module=r"(transformers|torch|huggingface_hub|accelerate)\b")
    warnings.showwarning = lambda message, *_, **__: notify(f"warning: {message}")
