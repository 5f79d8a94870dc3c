"""The commands on models and their cards: variants, patch, describe, shim, card, push, table."""

from __future__ import annotations

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from .app import Command, app, notify, told
from .options import AsJson, Dtype, Model, Options, Overwrite, Quiet, Revision, Task, Token

Layers = Annotated[str | None, typer.Option(help='Self-attention layers to swap, such as "0-5,7"; all if left out.')]


@app.command(cls=Command)
def variants(
    name: Annotated[str | None, typer.Argument(help="One variant, to be shown in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the variants: name, what changes, paper. Or show one in full, with its options and their defaults."""
    from hf_attn_swap import list_variants
    from hf_attn_swap.layer.registry import get_variant
    from hf_attn_swap.text.table import Table

    chosen = list_variants() if name is None else [name]
    if as_json:
        print(json.dumps([_in_full(variant) for variant in chosen], indent=2))
        return
    if name is not None:
        shown = _in_full(name)
        pairs = (f"{option} = {default!r}" for option, default in shown["options"].items())
        shown["options"] = ", ".join(pairs) or "none"
        shown["aliases"] = ", ".join(shown["aliases"]) or "none"
        for key, value in shown.items():
            print(f"{key:12}{value}")
        if shown["options"] != "none":
            print(f"\n{inspect.getdoc(get_variant(name).Options)}")
        return
    about = {variant: get_variant(variant).about for variant in chosen}
    rows = [(variant, about[variant].summary, about[variant].paper) for variant in chosen]
    header = ("name", "what it changes", "paper")
    print(Table(summary="hf-attn-swap variants NAME shows one in full.", header=header, rows=rows).text())
    print('Variants that touch different places compose with "+", as in outeffhop+gated.')


def _in_full(name: str) -> dict[str, Any]:
    """What the registry knows of a variant."""
    from hf_attn_swap.layer.registry import get_variant

    variant = get_variant(name)
    about = variant.about
    return {
        "name": variant.name,
        "aliases": list(variant.aliases),
        "summary": about.summary,
        "formula": about.formula,
        "paper": about.paper,
        "fused": about.fused,
        "adds": about.parameters_added,
        "places": ", ".join(variant.places),
        "options": {field.name: field.default for field in dataclasses.fields(variant.Options)},
    }


@app.command(cls=Command)
def patch(
    model: Model,
    variant: Annotated[
        str, typer.Argument(help='Name from `variants`, or a composition such as "modern_hopfield+belief".')
    ],
    out: Annotated[Path, typer.Argument(help="Folder for the result.")],
    strength: Annotated[float, typer.Option(help="0 is the pretrained model, 1 the paper's formula.")] = 1.0,
    layers: Layers = None,
    modules: Annotated[
        str | None, typer.Option(help='Only inside these modules, as "language_model"; --layers counts inside them.')
    ] = None,
    option: Options = None,
    task: Task = None,
    dtype: Dtype = "auto",
    revision: Revision = None,
    token: Token = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Swap the attention and save, without any training. For a look inside, or to fine-tune; `convert` loses less."""
    from hf_attn_swap.publish.checkpoint import patch_checkpoint
    from hf_attn_swap.text.typed import parse_layers, parse_options

    fresh = patch_checkpoint(
        model,
        variant,
        out,
        strength=strength,
        layers=parse_layers(layers),
        modules=modules,
        options=parse_options(option or [], composed="+" in variant),
        task=task,
        dtype=dtype,
        revision=revision,
        token=token,
        overwrite=overwrite,
        notify=told(quiet),
    )
    if fresh:
        notify(f"note: not in the checkpoint, so newly initialised: {', '.join(fresh)}")


@app.command(name="describe", cls=Command)
def describe_command(
    model: Model,
    variant: Annotated[
        str | None, typer.Option(help="Describe a stock model as if this variant were swapped in, as for `patch`.")
    ] = None,
    layers: Layers = None,
    option: Options = None,
    task: Task = None,
    revision: Revision = None,
    token: Token = None,
    as_json: AsJson = False,
) -> None:
    """Say what is swapped in a model, or what could be.

    The command reads the config and no weights. With --variant it says what `patch` would do: which layers run what,
    with which options, and how many parameters come in; or why it refuses.
    """
    from hf_attn_swap import describe, patch_model
    from hf_attn_swap.publish.checkpoint import skeleton
    from hf_attn_swap.text.typed import parse_layers, parse_options

    notify(f"reading the config of {model}")
    described = skeleton(model, task, revision=revision, token=token)
    if variant is None and (layers is not None or option):
        raise ValueError("--layers and --option say where and how the variant runs; name it with --variant.")
    if variant is not None:
        if getattr(described.config, "attn_swap", None) is not None:
            raise ValueError(f"{model} is converted already; without --variant, describe says what runs in it.")
        patch_model(
            described, variant, layers=parse_layers(layers), **parse_options(option or [], composed="+" in variant)
        )
    description = describe(described)
    if as_json:
        print(json.dumps(description.to_dict(), indent=2))
        return
    print(description.table().text())
    numbers = [row.layer for row in description.rows if row.layer is not None]
    if numbers and all(row.strength is None for row in description.rows):
        which = "Layer 0" if numbers[-1] == 0 else f"Layers 0 to {numbers[-1]}"
        print(f"{which} can be swapped: hf-attn-swap patch {model} VARIANT OUT")
        print(f"Some variants ask more of a layer: hf-attn-swap describe {model} --variant VARIANT")


@app.command(name="shim", cls=Command)
def shim_command(folder: Annotated[Path, typer.Argument(help="Folder of a saved converted model.")]) -> None:
    """Let an older checkpoint load with trust_remote_code=True. It then needs no import of the package."""
    from hf_attn_swap.publish.checkpoint import add_shim

    print(f"{folder} loads with trust_remote_code=True: {', '.join(add_shim(folder))}")


@app.command(cls=Command)
def card(
    results: Annotated[Path, typer.Argument(help="A results.json.")],
    out: Annotated[Path | None, typer.Option(help="File to write the card into; printed if left out.")] = None,
    repo: Annotated[str | None, typer.Option(help="Name on the Hub, for the lines that load the model.")] = None,
) -> None:
    """Render the model card of a run from its results.json. And from the commands.txt beside it if there is one."""
    from hf_attn_swap.publish.card import commands_beside, render
    from hf_attn_swap.publish.results import RunResult

    text = render(RunResult.load(results), repo, commands_beside(results))
    print(text) if out is None else out.write_text(text, encoding="utf-8")


@app.command(cls=Command)
def push(
    folder: Annotated[Path, typer.Argument(help="Folder of a saved converted model.")],
    repo: Annotated[str, typer.Argument(help="Name on the Hub, such as me/bert-belief.")],
    results: Annotated[
        Path | None, typer.Option(help="The run's results.json; the one in the folder if left out.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Make a new repository private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Publish nothing: print the files that would go, and the card.")
    ] = False,
    token: Token = None,
) -> None:
    """Publish a saved model in one commit, with its card. The card is the one that results.json gives.

    Weights go as safetensors, and no program but the shim of this package and the file of a variant of your own.
    """
    from hf_attn_swap.publish.card import bare_card
    from hf_attn_swap.publish.hub import CARD, files_to_publish, push_folder

    if dry_run:
        from hf_attn_swap.text.table import Table

        files, swaps, modules = files_to_publish(folder, repo, results)
        card = files.setdefault(CARD, bare_card(swaps, modules, repo).encode())
        sizes = {name: file.stat().st_size if isinstance(file, Path) else len(file) for name, file in files.items()}
        rows = [(name, f"{size:,}") for name, size in sorted(sizes.items())]
        summary = f"{len(rows)} files of {folder} would go to {repo}; a card that it already has stays without results."
        print(Table(summary=summary, header=("file", "bytes"), rows=rows).text())
        print(f"\n{card.read_text(encoding='utf-8') if isinstance(card, Path) else card.decode()}", end="")
        return
    notify(f"pushing {folder} to {repo}")
    print(push_folder(folder, repo, results=results, private=private, revision=revision, token=token).commit_url)


@app.command(name="table", cls=Command)
def table_command(folder: Annotated[Path, typer.Argument(help="Folder of runs, such as model_cards/runs/.")]) -> None:
    """One Markdown table of all runs in a folder."""
    from hf_attn_swap.publish.card import table

    print(table(folder), end="")
