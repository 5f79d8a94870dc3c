"""An option that a checkpoint leaves out has its default."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForMaskedLM

from hf_attn_swap import patch_model
from tests.contract.harness import fresh, refused, swaps


def written(folder: Path) -> dict[str, object]:
    block = json.loads((folder / "config.json").read_text())["attn_swap"]
    options: dict[str, object] = block["swaps"][0]["options"]["modern_hopfield"]
    return options


@pytest.mark.parametrize("memory", ["auto", "low"])
def test_written_and_read(memory: str, tmp_path: Path) -> None:
    patch_model(fresh("bert"), "modern_hopfield", memory=memory).save_pretrained(tmp_path)
    assert written(tmp_path)["memory"] == memory
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert [swap.variants[0].options.memory for swap in swaps(again)] == [memory] * len(swaps(again))


def test_left_out(tmp_path: Path) -> None:
    patch_model(fresh("bert"), "modern_hopfield", memory="low").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["attn_swap"]["swaps"][0]["options"]["modern_hopfield"]["memory"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert [swap.variants[0].options.memory for swap in swaps(again)] == ["auto"] * len(swaps(again))


def test_a_wrong_value_in_a_checkpoint(tmp_path: Path) -> None:
    patch_model(fresh("bert"), "modern_hopfield", memory="low").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["attn_swap"]["swaps"][0]["options"]["modern_hopfield"]["memory"] = "none"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with refused("option memory must be 'auto' or 'low'"):
        AutoModelForMaskedLM.from_pretrained(tmp_path)
