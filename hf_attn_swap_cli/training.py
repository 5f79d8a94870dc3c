"""The command that trains: one subcommand per recipe, which takes the recipe's own arguments."""

from __future__ import annotations

import importlib
from typing import Annotated

import typer

from .app import QUIET, Command, app

AS_GIVEN = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}

train = typer.Typer(rich_markup_mode=None)
app.add_typer(train, name="train")


@train.callback(invoke_without_command=True)
def recipes(
    context: typer.Context,
    listed: Annotated[bool, typer.Option("--list", help="List the recipes and the configurations that ship.")] = False,
) -> None:
    """Train a variant beside its softmax control. One of the recipes trains, and writes the record and the card.

    After the recipe stand a configuration that ships or a YAML file, and options, which win over the file:
    hf-attn-swap train text-classification ag_news --variant belief. The options are the recipe's own and those of
    transformers' TrainingArguments; --help after the recipe shows them. --quiet, or -q, shows no progress. On several
    GPUs: accelerate launch --multi_gpu -m hf_attn_swap_cli train, with the same arguments; a step of n processes then
    reads n times the rows.
    """
    if listed:
        _list()
    elif context.invoked_subcommand is None:
        print(context.get_help())


@train.command("text-classification", cls=Command, add_help_option=False, context_settings=AS_GIVEN)
def text_classification(context: typer.Context) -> None:
    """A classifier of texts or pairs of texts: AG News, GLUE."""
    _run("text_classification", context.args)


@train.command("image-classification", cls=Command, add_help_option=False, context_settings=AS_GIVEN)
def image_classification(context: typer.Context) -> None:
    """A classifier of images: CIFAR-10."""
    _run("image_classification", context.args)


@train.command("language-modeling", cls=Command, add_help_option=False, context_settings=AS_GIVEN)
def language_modeling(context: typer.Context) -> None:
    """A causal or masked language model: WikiText-2."""
    _run("language_modeling", context.args)


def _run(recipe: str, arguments: list[str]) -> None:
    """Run a recipe, which reads the arguments itself, but for --quiet."""
    words = [word for word in arguments if word not in QUIET]
    importlib.import_module(f"hf_attn_swap.training.recipes.{recipe}").main(words)


def _list() -> None:
    """Print the recipes with their configurations."""
    from hf_attn_swap.configurations import first_line, shipped
    from hf_attn_swap.text.table import Table

    rows = [(path.parent.name.replace("_", "-"), name, first_line(path)) for name, path in shipped().items()]
    summary = "Configurations that ship: hf-attn-swap train RECIPE CONFIGURATION --variant VARIANT"
    print(Table(summary=summary, header=("recipe", "configuration", "what it trains"), rows=rows).text())
