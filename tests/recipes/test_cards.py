"""The commands on the cards: they can be typed in a clone, and they make the model that the card describes."""

from __future__ import annotations

import json
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer

from hf_attn_swap.conversion.config import Distil
from hf_attn_swap.publish.card import commands_beside
from hf_attn_swap.publish.results import RESULTS_FILE, RunResult
from hf_attn_swap.training.run import TRAINED
from hf_attn_swap.training.stages import FineTune
from hf_attn_swap_cli.app import app
from tests.harness.recipes import RECIPES, needs_recipes, recipe

pytestmark = needs_recipes
ROOT = RECIPES.parent
CARDS = sorted(path.parent for path in (ROOT / "model_cards").glob(f"*/{RESULTS_FILE}"))


class ConvertConfig(Exception):  # noqa: N818
    """What a recipe was asked to do, in place of the training."""


def asked(command: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...]:
    """What the recipe's command line says: about, model, data, conversion and training."""

    def stop(_: Any, *arguments: Any) -> None:
        raise ConvertConfig(*arguments)

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(import_module("hf_attn_swap.training.compare"), "compare", stop)
    python, script, *arguments = command
    assert (python, Path(script).parent) == ("python", Path("recipes"))
    with pytest.raises(ConvertConfig) as result:
        recipe(Path(script).name, arguments, monkeypatch)
    return result.value.args


def commands(folder: Path) -> list[list[str]]:
    return [shlex.split(line) for line in commands_beside(folder / RESULTS_FILE) if not line.startswith("#")]


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_the_first_command_makes_the_model_of_the_card(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunResult.load(folder / RESULTS_FILE)
    about, model, data, conversion, training = asked(commands(folder)[0], monkeypatch)
    assert f"{about.prefix}-{model.run_name}" == run.name
    assert (about.prefix, about.task, about.auto_class) == (run.study, run.task, run.base.auto_class)
    assert (model.published_name, model.variant) == (run.base.name, run.variant)
    assert tuple(model.seeds) == run.converted.seeds
    options = {name: value for swap in run.swaps for part in swap.components for name, value in part.options.items()}
    assert json.loads(model.options).items() <= options.items()
    made_here = data.dataset_name.startswith("data/")  # prepare_data.py makes these folders
    assert (data.dataset_card_name if made_here else data.published_name) == run.data.name
    assert run.data.config in (None, data.dataset_config_name)  # a run on a folder of this data has no configuration
    assert (data.test_split_name, data.max_seq_length) == (run.data.evaluated, run.budget.sequence_length)
    assert conversion.steps == run.steps
    assert training.train_batch_size == run.budget.batch_size
    told = " ".join(run.conversion)
    for stage in conversion.plan:
        if isinstance(stage, Distil):
            budget = f"{stage.epochs:g} epochs" if stage.tokens is None else f"{stage.tokens:,} tokens"
            assert budget in told
            assert f"learning rate {stage.learning_rate:g}" in told
            assert (f"LoRA of rank {stage.rank}" in told) == (stage.rank is not None)
        if isinstance(stage, FineTune) and run.budget.steps:
            assert f"Fine-tuned for {training.num_train_epochs:g} epochs" in told
            assert training.learning_rate == run.budget.learning_rate


@pytest.mark.parametrize("folder", CARDS, ids=lambda folder: folder.name)
def test_the_second_command_publishes_what_the_first_one_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, (program, name, *arguments) = commands(folder)
    _, model, _, _, training = asked(first, monkeypatch)
    made = Path(training.output_dir) / model.run_name
    context = typer.main.get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]
    assert (program, name) == ("hf-attn-swap", "push")
    assert context.params["folder"] == made / f"seed-{model.seeds[0]}" / TRAINED
    assert context.params["results"] == made / RESULTS_FILE
    assert context.params["repo"] == f"your-name/{folder.name}"
