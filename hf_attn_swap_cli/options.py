"""The arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

from .app import QUIET

Model = Annotated[str, typer.Argument(help="Name on the Hub, or folder of a saved model, stock or converted.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--option", "-o", metavar="<str>", help="key=value; component.key=value in a composition."),
]
Task = Annotated[
    str | None,
    typer.Option(
        "--task",
        "--auto-class",
        help="AutoModel class, such as AutoModelForCausalLM or causal-lm; by default the class that was saved.",
    ),
]
Device = Annotated[str | None, typer.Option(help="Such as cpu or cuda; CUDA if left out, or the CPU without CUDA.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto: the checkpoint's.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of the model.")]
Token = Annotated[str | None, typer.Option(help="Token of the Hub, for a private model; the stored one if left out.")]
Data = Annotated[str, typer.Option(help="Set on the Hub, folder, or file of text or images.")]
Columns = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="<str>",
        help="Column of the text or the image (text if left out); given twice, pairs of texts.",
    ),
]
Config = Annotated[str | None, typer.Option(help="Configuration of the set, such as a GLUE task.")]
Split = Annotated[str | None, typer.Option(help="Split of the set; the held-out split if left out.")]
Stream = Annotated[
    bool | None,
    typer.Option(
        "--stream/--no-stream",
        help="Read no more of the data than is needed, without a copy on this machine; if left out, above 500 MB.",
    ),
]
LENGTH = 256  # tokens of a row, for every command that joins or cuts texts, unless the model has fewer positions
Length = Annotated[
    int | None,
    typer.Option("--length", "--max-length", min=2, help=f"Number of tokens of a row; {LENGTH} if left out."),
]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", "--processor", help="Tokenizer or image processor, if the model's folder has none."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Write into a folder that is not empty.")]

Quiet = Annotated[bool, typer.Option(*QUIET, help="Show no progress: only the result, and errors.")]


def columns(names: list[str] | None) -> list[str]:
    """The columns that the user named, or the usual one.

    Raises:
        ValueError: there are more than two.
    """
    if names is not None and len(names) > 2:
        raise ValueError(f"--column names one column, or the two of pairs of texts, not {len(names)}.")
    return names or ["text"]
