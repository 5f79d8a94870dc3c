"""An option that a checkpoint leaves out has its default."""

from __future__ import annotations

import json
from pathlib import Path

from transformers import AutoModelForMaskedLM

from hf_attn_swap import patch_model
from tests.contract.harness import fresh, swaps


def test_left_out(tmp_path: Path) -> None:
    patch_model(fresh("bert"), "modern_hopfield", memory="low").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["attn_swap"]["swaps"][0]["options"]["modern_hopfield"]["memory"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    again = AutoModelForMaskedLM.from_pretrained(tmp_path)
    assert [swap.variants[0].options.memory for swap in swaps(again)] == ["auto"] * len(swaps(again))
