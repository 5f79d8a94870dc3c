"""The recipe that shows what 8 bits cost: its rows, and its figures against the same ones worked out here."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import smooth
from hf_attn_swap.quantization import machine_w8a8
from tests import zoo
from tests.harness.byte_tokenizer import byte_tokenizer
from tests.harness.recipes import needs_recipes, recipe

from .printed import rows

pytestmark = needs_recipes
ROWS = ("stock, full precision", "stock, 8 bits", "smoothed, 8 bits", "sink, full precision", "sink, 8 bits")


@pytest.mark.parametrize("protocol", ["machine", "papers"])
def test_the_table(protocol: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    model = zoo.build("llama", head="lm", vocab_size=256)
    model.save_pretrained(tmp_path / "model")
    byte_tokenizer("right").save_pretrained(tmp_path / "model")
    generator = torch.Generator().manual_seed(0)
    for name in ("one", "two", "fit"):
        ids = torch.randint(97, 122, (8, 16), generator=generator)
        Dataset.from_dict({"text": ["".join(map(chr, row)) for row in ids.tolist()]}).to_parquet(
            tmp_path / f"{name}.parquet"
        )
    one, two, fit = (str(tmp_path / f"{name}.parquet") for name in ("one", "two", "fit"))
    where = [str(tmp_path / "model"), "--texts", one, two, "--ranges", fit, two, "--length", "16", "--rows", "3"]
    trained = [] if protocol == "papers" else ["--tokens", "64", "--learning-rate", "1e-3"]
    recipe("eight_bits.py", [*where, "--alpha", "0.5", "--token", "a", "--protocol", protocol, *trained], monkeypatch)
    captured = capsys.readouterr()
    found = rows(captured.out)
    last = ("sink, smoothed, trained, 8 bits",) if trained else ()
    assert tuple(found) == (*ROWS, "sink, smoothed, 8 bits", *last)
    assert "places are smoothed" in captured.err
    assert "stand before every text" in captured.err
    assert all(cell.endswith("= 1.000 (1.000 to 1.000)") for cell in found[ROWS[0]])
    assert len({tuple(cells) for cells in found.values()}) == len(found)
    if protocol == "papers":
        return
    tokens = {
        name: byte_tokenizer("right")("".join(Dataset.from_parquet(path)["text"])).input_ids
        for name, path in (("one", one), ("two", two), ("fit", fit))
    }
    blocks = {
        name: [{"input_ids": torch.tensor([ids[start : start + 16]])} for start in (0, 16, 32)]
        for name, ids in tokens.items()
    }
    ranges = [row for pair in zip(blocks["fit"], blocks["two"], strict=True) for row in pair]
    smooth(patch_model(model, "softmax"), ranges, 0.5, progress=False)
    with machine_w8a8(model, ranges), torch.no_grad():
        losses = [float(model(**row, labels=row["input_ids"]).loss) for row in blocks["one"]]
    assert found["smoothed, 8 bits"][0].startswith(f"{math.exp(sum(losses) / 3):.2f} = ")


def test_the_papers_protocol_does_not_train(monkeypatch: Any, capsys: Any) -> None:
    """Its rows would stand beside a row of another protocol."""
    with pytest.raises(SystemExit):
        recipe(
            "eight_bits.py",
            ["x", "--texts", "y", "--ranges", "z", "--tokens", "64", "--protocol", "papers"],
            monkeypatch,
        )
    assert "leave out --protocol" in capsys.readouterr().err
