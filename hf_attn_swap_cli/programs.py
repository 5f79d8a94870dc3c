"""The commands for other programs: run starts one with this package, and export writes a model for one without it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from .app import Command, app, told
from .options import Dtype, Quiet, Revision, Token


@app.command(name="run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def run_command(
    words: Annotated[
        list[str],
        typer.Argument(metavar="PROGRAM|-m MODULE [ARGUMENTS]...", help="The program, and all that it reads."),
    ],
) -> None:
    """Run another program with this package imported. A tool such as lm_eval then loads converted models."""
    from hf_attn_swap.run import find

    program = find(words)
    try:
        program()
    except Exception:  # noqa: BLE001  # the program's own error, shown as it would be without us
        sys.excepthook(*sys.exc_info())
        raise typer.Exit(1) from None


@app.command(cls=Command)
def export(
    model: Annotated[str, typer.Argument(help="Name on the Hub, or folder, of a converted model.")],
    out: Annotated[Path, typer.Argument(help="Folder to write, which does not exist.")],
    gguf: Annotated[Path | None, typer.Option(help="Write this file for llama.cpp, too, by its own converter.")] = None,
    llama_cpp: Annotated[
        Path | None, typer.Option(help="Folder of llama.cpp with convert_hf_to_gguf.py, if it is not on the path.")
    ] = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    quiet: Quiet = False,
) -> None:
    """Write a converted model for vLLM and llama.cpp. It is then an ordinary one, which runs without this package.

    The folder is loaded by a process without the package, and its logits are compared with those of the converted
    model; if they differ, nothing is written. What cannot leave is refused, with what can.
    """
    from hf_attn_swap.engines.export import export as write
    from hf_attn_swap.engines.gguf import find_converter, write_gguf
    from hf_attn_swap.publish.checkpoint import hub_arguments, load_checkpoint, processor_of

    say = told(quiet)
    for path in (out, gguf):
        if path is not None and path.exists():
            raise ValueError(f"{path} exists; name a path that does not exist.")
    converter = None if gguf is None else find_converter(llama_cpp)
    say(f"loading {model}")
    loaded = load_checkpoint(model, device="cpu", dtype=dtype, revision=revision, token=token)
    if getattr(loaded.config, "attn_swap", None) is None:
        raise ValueError(f"{model} is no converted model, so other programs run it as it is.")
    tokenizer = processor_of(loaded, model, hub_arguments(revision, token))
    say("writing, and comparing the logits")
    print(write(loaded, out, tokenizer))
    if gguf is not None and converter is not None:
        write_gguf(out, gguf, converter)
        print(f"{gguf}: for llama.cpp")
