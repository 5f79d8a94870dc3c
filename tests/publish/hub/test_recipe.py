"""A recipe pushes its first seed's model with the card of the whole run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.harness.recipes import RECIPES, needs_recipes

from ...training.conftest import options, tiny  # noqa: F401  # a fixture
from .conftest import Setup
from .store import WRITER

RECIPE = RECIPES / "text_classification.py"
PUSH = ("--push_to_hub", "true", "--hub_model_id")
pytestmark = needs_recipes


def test_pushed_with_its_card(world: Setup, tiny: Path, tmp_path: Path) -> None:  # noqa: F811  # the fixture
    words = options(tiny, tmp_path / "out", "--variant", "belief_star", "--save_strategy", "no", *PUSH, "me/tiny")
    environment = world.hub.env(tmp_path / "home", WRITER)
    done = subprocess.run(
        [sys.executable, str(RECIPE), *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    files = world.hub.repository("me/tiny").at().files
    assert {"README.md", "config.json", "model.safetensors", "results.json"} <= set(files)
    assert "outcome.json" not in files
    commits = world.hub.repository("me/tiny").commits
    assert len(commits) == 2, "one after the first: Trainer pushes no checkpoints, and nothing of the control"
