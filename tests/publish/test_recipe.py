"""A recipe pushes its first seed's model with the card of the whole run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.hub import Hub
from tests.harness.recipes import RECIPES, needs_recipes

from ..training.conftest import options, tiny  # noqa: F401  # a fixture

RECIPE = RECIPES / "text_classification.py"
PUSH = ("--push_to_hub", "true", "--hub_model_id")
pytestmark = needs_recipes


@pytest.mark.slow
def test_pushed_with_its_card(tiny: Path, tmp_path: Path) -> None:  # noqa: F811  # the fixture
    words = options(tiny, tmp_path / "out", "--variant", "belief_star", "--save_strategy", "no", *PUSH, "me/tiny")
    command = [sys.executable, str(RECIPE), *words]
    with Hub() as hub:
        done = subprocess.run(command, env=hub.env(tmp_path / "home"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    repository = hub.repositories["me/tiny"]
    assert {"README.md", "config.json", "model.safetensors", "results.json"} <= set(repository.files())
    assert "outcome.json" not in repository.files()
    assert len(repository.commits) == 2, "Trainer pushes no checkpoints, and nothing of the control"
