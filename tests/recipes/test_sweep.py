"""What a sweep's YAML turns into, and that every shipped one is well-formed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_attn_swap import configurations
from hf_attn_swap.layer.registry import parse
from tests.harness.recipes import RECIPES, needs_recipes

pytestmark = needs_recipes
CONFIGS = sorted((RECIPES / "configs").glob("*.yaml")) if RECIPES.is_dir() else []
SWEEPS = [path for path in CONFIGS if path.stem.startswith("sweep_")]


@pytest.fixture(scope="module")
def sweep() -> Any:
    spec = importlib.util.spec_from_file_location("sweep", RECIPES / "sweep.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_expand(sweep: Any) -> None:
    run = {
        "variant": "modern_hopfield",
        "label": "{variant}-{index}",
        "grid": {"layers": ["0", "1"], "stages": ["calibrate", "fine_tune"]},
    }
    result = list(sweep.expand(run))
    assert [each["label"] for each in result] == [f"modern_hopfield-{index}" for index in range(4)]
    assert [(each["layers"], each["stages"]) for each in result][1] == ("0", "fine_tune")
    assert sweep.words({"seeds": [0, 1], "variant": "modern_hopfield"}) == [
        "--seeds",
        "0",
        "1",
        "--variant",
        "modern_hopfield",
    ]


def test_the_control_shares_all_but_the_variant(sweep: Any) -> None:
    run = {
        "variant": "modern_hopfield",
        "stages": ["calibrate", "fine_tune"],
        "seeds": [3],
        "output_dir": "x",
        "config_overrides": "{}",
    }
    assert sweep.control(run) == {"variant": "softmax", "seeds": [3], "output_dir": "x", "config_overrides": "{}"}


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_shipped_sweeps(path: Path, sweep: Any) -> None:
    content = yaml.safe_load(path.read_text())
    assert (RECIPES / content["recipe"]).exists()
    assert configurations.find(content["config"], relative_to=path.parent).exists()
    runs = [each for run in content["runs"] for each in sweep.expand(run)]
    names = [sweep.name_of(run) for run in runs]
    assert len(set(names)) == len(names)
    for run in runs:
        parse(run["variant"])
