"""Table 1 in small: cells that go on after a stop, with the outliers over their steps, a table and curves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.recipes import needs_recipes, recipe
from tests.training.conftest import tiny  # noqa: F401  # a tokenizer with a mask token

pytestmark = needs_recipes
SIZES = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
    "opt": {"hidden_size": 16, "word_embed_proj_dim": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    | {"ffn_dim": 32, "max_position_embeddings": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "opt"])
def test_cells(name: str, tiny: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:  # noqa: F811
    text = tmp_path / "rows.txt"
    text.write_text("the film was good and the story bad " * 40, encoding="utf-8")
    out = tmp_path / "out"
    chosen = [str(out), "--models", name, "--arms", "softmax", "outeffhop+gated", "--seeds", "0", "--every", "2"]
    words = ["--train_file", str(text), "--test_file", str(text), "--max_seq_length", "16", "--max_steps", "4"]
    words += ["--save_steps", "3", "--config_overrides", json.dumps(SIZES[name])]
    words += ["--tokenizer_name", str(tiny / "model")] if name == "bert" else []
    recipe("table_1.py", [*chosen, "--", *words, "--use_cpu", "true", "--disable_tqdm", "true"], monkeypatch)
    files = sorted(out.rglob("results.json"))
    assert [path.parent.parent.name for path in files] == ["outeffhop-gated", "softmax"]
    for path in files:
        result = json.loads(path.read_text())
        assert [step for step, *_ in result["curve"]] == [1, 2, 4]
        assert all(kurtosis > 0 and norm > 0 for _, kurtosis, norm in result["curve"])
        assert result["metric"] == "perplexity"
        assert result["w8a8"] == pytest.approx(result["full"], rel=0.2)
        assert result["w8a8"] != result["full"]
        assert result["kurtosis"] > 0
    assert "`outeffhop+gated`" in capsys.readouterr().out
    assert (out / "curves.png").stat().st_size > 10_000
    times = [path.stat().st_mtime_ns for path in files]
    recipe("table_1.py", [*chosen, "--draw"], monkeypatch)
    recipe("table_1.py", chosen, monkeypatch)  # nothing is done twice
    assert [path.stat().st_mtime_ns for path in files] == times
