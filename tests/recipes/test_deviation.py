"""SimpleTRON's Figures 3 and 5 in small: curves of every arm, and deviations that a formula by hand gives too."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_attn_swap import patch_model
from tests import zoo
from tests.contract.harness import fresh
from tests.harness.recipes import NO_SAVING, RECIPES, needs_recipes, recipe
from tests.training.conftest import options, tiny  # noqa: F401  # a model, its tokenizer and sentences on disk

pytestmark = needs_recipes


@pytest.mark.parametrize("variant", ["softmax", "simpletron_resl"])
def test_deviations_by_hand(variant: str) -> None:
    """Of a layer of BERT over real tokens: softmax with its scaling, the softmax left out; L^(-1/2) q k^T v."""
    model = patch_model(fresh("bert"), variant)
    batch = zoo.inputs("bert", batch=2, length=7, padded="right")
    callback: Any = runpy.run_path(str(RECIPES / "deviation.py"))["DeviationCallback"](None, 1)
    state: Any = type("State", (), {"global_step": 0})()
    callback.on_step_begin(None, state, None, model=model)
    core, seen = model.bert.encoder.layer[0].attention.self, {}
    for name in ("query", "key", "value"):
        hook = lambda module, args, out, name=name: seen.update({name: out.detach()})  # noqa: E731
        getattr(core, name).register_forward_hook(hook)
    model(**batch)
    heads, width = core.num_attention_heads, core.attention_head_size
    read = []
    for row, real in zip(range(2), batch["attention_mask"].bool(), strict=True):
        q, k, v = (seen[name][row][real].view(-1, heads, width).transpose(0, 1) for name in ("query", "key", "value"))
        read.append((q @ k.mT @ v * (width if variant == "softmax" else real.sum()) ** -0.5).transpose(0, 1))
    assert len({len(each) for each in read}) > 1, "rows of different lengths"
    assert callback.seen["products_0"] == [pytest.approx(float(torch.cat(read).float().std()), rel=1e-5)]
    assert (callback.seen["heads_0"] == callback.seen["products_0"]) is (variant != "softmax")


@pytest.mark.slow
def test_arms(tiny: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:  # noqa: F811
    config, out = tmp_path / "own.yaml", tmp_path / "out"
    config.write_text("text_column_names: [text]\n")
    words = options(tiny, tmp_path, "--max_steps", "4", "--logging_steps", "2", *NO_SAVING)
    del words[words.index("--output_dir") : words.index("--output_dir") + 2]
    arms = ["softmax", "simpletron_resl:skip=block"]
    chosen = [str(out), str(config), "--arms", *arms, "--every", "2"]
    recipe("deviation.py", [*chosen, "--", *words], monkeypatch)
    cells = json.loads((out / "deviation.json").read_text())
    assert [each["arm"] for each in cells] == arms
    for each in cells:
        assert [step for step, _ in each["losses"]] == [2, 4]
        assert [(step, len(values)) for step, *values in each["products"]] == [(1, 2), (2, 2), (4, 2)]
    assert json.loads((out / "simpletron-resl-skip-block" / "seed-0" / "outcome.json").read_text())["swap"].count(
        "block"
    )
    assert "`simpletron_resl:skip=block`" in capsys.readouterr().out
    assert (out / "deviation.png").stat().st_size > 10_000
    before = [path.stat().st_mtime_ns for path in out.rglob("outcome.json")]
    recipe("deviation.py", [*chosen, "--", *words], monkeypatch)  # nothing is done twice
    assert [path.stat().st_mtime_ns for path in out.rglob("outcome.json")] == before
