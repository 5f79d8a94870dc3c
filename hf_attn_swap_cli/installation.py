"""The command that checks the installation: doctor."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from .app import Command, app, notify
from .options import AsJson


@app.command(cls=Command)
def doctor(
    device: Annotated[
        str | None, typer.Option(help="Such as cpu or cuda:1; CUDA if left out, or the CPU without CUDA.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this installation: versions, and every variant. The variants run on a tiny model of every known family.

    The exit code is 1 if a result is wrong. The check takes seconds and needs no network.
    """
    from hf_attn_swap import doctor

    notify("checking this installation")
    diagnosis = doctor(device=device)
    if as_json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        print(diagnosis.table().text())
    if not diagnosis.ok:
        raise typer.Exit(1)
