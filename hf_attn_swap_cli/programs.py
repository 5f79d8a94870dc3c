"""The command that runs another program: run."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .app import app


@app.command(name="run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run_command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="PROGRAM|-m MODULE [ARGUMENTS]...", help="The program, and all that it reads."),
    ],
) -> None:
    """Run another program, such as lm_eval, with this package imported: it then loads converted models."""
    from hf_attn_swap.run import find

    program = find(words)
    try:
        program()
    except Exception:  # noqa: BLE001  # the program's own error, shown as it would be without us
        sys.excepthook(*sys.exc_info())
        raise typer.Exit(1) from None
