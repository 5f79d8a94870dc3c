"""The recipe that shows what 8 bits cost: its rows, and its figures against the same ones worked out here."""

from __future__ import annotations

import copy
import json
import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import smooth
from hf_attn_swap.quantization import fake_w8a8, machine_w8a8
from tests import zoo
from tests.harness.byte_tokenizer import build, byte_tokenizer
from tests.harness.recipes import RECIPES, needs_recipes, recipe

from .printed import rows

pytestmark = needs_recipes
ROWS = ("stock, full precision", "stock, 8 bits", "smoothed, 8 bits", "sink, full precision", "sink, 8 bits")
ROTATED = ("rotated, 8 bits", "rotated, sink, 8 bits")
TRAINED = {"machine": "sink, smoothed, trained, 8 bits", "papers": "sink, trained, 8 bits"}


def read_by_norms(model: Any, row: Any) -> tuple[float, str, int]:
    """The largest number that a norm reads, the path of the norm, and the place of the token."""
    results: list[tuple[float, str, int]] = []

    def hook(path: str) -> Any:
        return lambda _, args: results.append(
            (float(args[0].abs().max()), path, int(args[0][0].abs().amax(1).argmax()))
        )

    norms = [(path, each) for path, each in model.named_modules() if type(each).__name__.endswith("Norm")]
    hooks = [norm.register_forward_pre_hook(hook(path)) for path, norm in norms]
    with torch.no_grad():
        model(**row)
    for each in hooks:
        each.remove()
    return max(results)


@pytest.mark.parametrize("protocol", ["machine", pytest.param("papers", marks=pytest.mark.slow)])
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
    where = [str(tmp_path / "model"), "--texts", one, two, "--ranges", fit, two]
    sizes = ["--length", "16", "--rows", "3", "--range-rows", "2"]
    how = [
        "--alpha",
        "0.5",
        "--token",
        "a",
        "--protocol",
        protocol,
        "--tokens",
        "64",
        "--learning-rate",
        "1e-3",
        "--rotate",
    ]
    recipe("eight_bits.py", [*where, *sizes, *how], monkeypatch)
    captured = capsys.readouterr()
    table = rows(captured.out)
    assert tuple(table) == (*ROWS, "sink, smoothed, 8 bits", TRAINED[protocol], *ROTATED)
    assert "places are smoothed" in captured.err
    assert captured.err.count("stand before every text") == 2
    assert "Rotated; relative error" in captured.err
    assert all(cell.endswith("= 1.000 (1.000 to 1.000)") for cell in table[ROWS[0]][:-1])
    assert len({tuple(cells) for cells in table.values()}) == len(table)
    tokens = {
        name: byte_tokenizer("right")("".join(Dataset.from_parquet(path)["text"])).input_ids
        for name, path in (("one", one), ("two", two), ("fit", fit))
    }
    blocks = {
        name: [{"input_ids": torch.tensor([ids[start : start + 16]])} for start in (0, 16, 32)]
        for name, ids in tokens.items()
    }
    ranges = [row for pair in zip(blocks["fit"][:2], blocks["two"][:2], strict=True) for row in pair]
    largest = max(read_by_norms(model, row)[0] for row in (*blocks["one"], *blocks["two"]))
    assert float(table[ROWS[0]][-1].partition(",")[0]) == pytest.approx(largest, rel=1e-2)

    def in_8_bits(model: Any) -> str:
        with {"machine": machine_w8a8, "papers": fake_w8a8}[protocol](model, ranges), torch.no_grad():
            losses = [float(model(**row, labels=row["input_ids"]).loss) for row in blocks["one"]]
        return f"{math.exp(sum(losses) / 3):.2f} = "

    rotated = copy.deepcopy(model)
    monkeypatch.syspath_prepend(str(RECIPES))
    import_module("rotate").rotate(rotated, ranges)
    assert table[ROTATED[0]][0].startswith(in_8_bits(rotated))
    smooth(patch_model(model, "softmax"), ranges, 0.5, progress=False)
    assert table["smoothed, 8 bits"][0].startswith(in_8_bits(model))


def test_a_classifier_of_texts(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """Its accuracy by hand, its largest activation, and no row with a sink: [SEP] reads the text after it."""
    model, tokenizer = build("bert", head="classification", num_labels=2)
    with torch.no_grad():
        model.get_input_embeddings().weight[tokenizer.pad_token_id] = 100.0  # larger than all that real tokens have
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    texts = [chr(97 + index) * (3 + index) for index in range(9)]
    with torch.no_grad():
        own = [model(**tokenizer(text, return_tensors="pt")).logits[0].argmax().item() for text in texts]
    wrong = [int(label) ^ (index % 3 == 0) for index, label in enumerate(own)]
    Dataset.from_dict({"text": texts, "label": wrong}).to_parquet(tmp_path / "test.parquet")
    data = str(tmp_path / "test.parquet")
    where = [str(tmp_path / "model"), "--texts", data, "--ranges", data, "--rows", "9", "--batch", "4", "--rotate"]
    recipe("eight_bits.py", [*where, "--figures", str(tmp_path / "out.json")], monkeypatch)
    captured = capsys.readouterr()
    table = rows(captured.out)
    assert tuple(table) == ROWS[:3]
    assert "Nothing is rotated" in captured.err
    assert table[ROWS[0]][0] == "66.7, +0.0 (+0.0 to +0.0)"
    assert "There is no sink: a token before the text stands for a pair only in a causal language model" in captured.err
    written = json.loads((tmp_path / "out.json").read_text("utf-8"))
    (figures,) = written["runs"][ROWS[0]]["figures"].values()
    assert figures == pytest.approx([6 / 9, 0, 0, 0])
    value, norm, place, number = max(
        (*read_by_norms(model, tokenizer(text, return_tensors="pt")), number) for number, text in enumerate(texts)
    )
    largest = written["runs"][ROWS[0]]["largest"]
    assert (largest["norm"], largest["place"], largest["word"]) == (norm, place, texts[number][0])
    assert largest["value"] == pytest.approx(value, rel=1e-4)
    with pytest.raises(SystemExit, match="language models alone"):
        recipe("eight_bits.py", [*where, "--tokens", "8"], monkeypatch)
    with pytest.raises(ValueError, match="has 9 rows, but 10 are needed"):
        recipe("eight_bits.py", [*where[:-5], "--rows", "10"], monkeypatch)
