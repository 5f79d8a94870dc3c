"""The benchmark of decoding runs on a tiny model, and the cache of linear layers and of windows does not grow."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

BENCH = Path(__file__).parents[2] / "benchmarks" / "bench_decode.py"
pytestmark = pytest.mark.skipif(not BENCH.exists(), reason="benchmarks/ is not next to the installed package")


@pytest.mark.parametrize("swap", [("simpletron_resl", "{}"), ("window", '{"window": 16}')], ids=["linear", "window"])
def test_stock_beside_a_swap(swap: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    out = tmp_path / "decode.json"
    flags = ["--contexts", "128", "1024", "--rounds", "2", "--threads", "1", "--layers", "0,1", "--out", str(out)]
    flags += ["--variant", swap[0], "--variant_options", swap[1]]
    monkeypatch.setattr(sys, "argv", ["bench_decode.py", "--model", str(tmp_path / "model"), *flags])
    monkeypatch.syspath_prepend(str(BENCH.parent))
    runpy.run_path(str(BENCH), run_name="__main__")
    rows = {(row["context"], row["model"]): row for row in json.loads(out.read_text())["rows"]}
    assert set(rows) == {(context, name) for context in (128, 1024) for name in ("stock", "converted")}
    sizes = {key: row["cache_mb"] for key, row in rows.items()}
    assert sizes[1024, "stock"] > 6 * sizes[128, "stock"] > 0
    assert 0 < sizes[1024, "converted"] < 1.5 * sizes[128, "converted"]
    assert all(row["decode_95"][0] <= row["decode"] <= row["decode_95"][1] for row in rows.values())
