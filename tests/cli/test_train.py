"""`hf-attn-swap train`: what it lists and refuses, and a run of a recipe through it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_attn_swap import configurations
from hf_attn_swap.publish.results import RunResult
from tests.training.conftest import options, tiny  # noqa: F401  # the tiny model and sentences of the recipes


def test_list(command: Any) -> None:
    told = command("train", "--list")
    assert told.code == 0
    lines = {tuple(line.split()[:2]): line for line in told.out.splitlines()}
    for name, path in configurations.shipped().items():
        recipe = path.parent.name.replace("_", "-")
        assert configurations.first_line(path) in lines[recipe, name]


def test_without_a_recipe(command: Any) -> None:
    assert "text-classification" in command("train").out
    assert command("train", "text-clasification").err.startswith("error: No such command 'text-clasification'.")


def test_the_help_of_a_recipe_has_all_its_options(command: Any, capsys: Any) -> None:
    with pytest.raises(SystemExit) as ended:
        command("train", "text-classification", "--help")
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith("usage: hf-attn-swap train text-classification ")
    for option in ("--variant", "--stages", "--regression", "--learning_rate"):
        assert option in told


def test_a_run(command: Any, tiny: Path, tmp_path: Path) -> None:  # noqa: F811  # the fixture
    words = options(
        tiny, tmp_path, "--variant", "modern_hopfield", "--options", '{"alpha": 0.25}', "--save_strategy", "no"
    )
    told = command("train", "text-classification", *words)
    assert told.code == 0
    assert "difference to the softmax control" in told.out
    (swap,) = RunResult.load(tmp_path / "modern-hopfield" / "results.json").swaps
    assert swap.components[0].options["alpha"] == 0.25
