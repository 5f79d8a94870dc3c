"""The recipe behind BeliefFormer's Figure 3: in the first layer, what W_o gives with and without the projection."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_attn_swap import patch_model
from tests import zoo
from tests.harness.recipes import needs_recipes, recipe

from .printed import rows


@needs_recipes
@pytest.mark.parametrize("variant", ["softmax", "belief"])
def test_both_lengths_of_one_pass(variant: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    model = zoo.build("llama", head="lm")
    patch_model(model, variant).save_pretrained(tmp_path / "model")
    ids = zoo.inputs("llama", batch=3, length=9)["input_ids"]
    Dataset.from_dict({"ids": ids.tolist()}).to_parquet(tmp_path / "test.parquet")
    words = ["--column", "ids", "--length", "9", "--rows", "3", "--draw", str(tmp_path / "geometry.png")]
    recipe("belief_geometry.py", [str(tmp_path / "model"), str(tmp_path / "test.parquet"), *words], monkeypatch)
    table = rows(capsys.readouterr().out)
    lengths: list[torch.Tensor] = []
    model.model.layers[0].self_attn.o_proj.register_forward_hook(lambda *given: lengths.append(given[2].norm(dim=-1)))
    with torch.no_grad():
        for name in ("softmax", "belief"):
            patch_model(model, name)(ids)
    long, short = lengths
    assert table["0"][:3] == [f"{long.mean():.4g}", f"{short.mean():.4g}", f"{(short <= long).double().mean():.1%}"]
    assert (tmp_path / "geometry.png").stat().st_size > 10_000
