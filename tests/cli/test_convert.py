"""The command `convert`: what it saves, what it refuses in one line, and what happens to a budget that is missed."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from hf_attn_swap import patch_model
from hf_attn_swap.conversion import rows as rows_module
from hf_attn_swap.publish import converted
from hf_attn_swap.publish.results import RunResult
from hf_attn_swap.quantization import int8_loaded, machine_w8a8
from hf_attn_swap_cli import measures
from tests.harness.process import python

from .conftest import WORDS, Outcome

Command = Callable[..., Outcome]


def last_lines(outcome: Outcome) -> list[str]:
    """The lines on stderr that are no progress bars."""
    return [line for line in outcome.err.splitlines() if line.startswith(("error: ", "nothing was saved", "saving"))]


def test_convert_saves_a_model_that_loads(command: Command, tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = command("convert", tiny_bert, "belief", out, "--data", texts, "--tokens", "400", "--device", "cpu")
    assert outcome.code == 0
    report = json.loads((out / "conversion.json").read_text())
    assert report["layers"] == [0, 1]
    assert report["steps"][0]["name"] == "swap"
    assert report["steps"][-1]["name"] == "distil 1"
    assert 0 < report["steps"][-1]["tokens"] <= 400
    assert "2 of 2 layers run belief" in outcome.out
    record = RunResult.load(out / "results.json")
    assert record.variant == "belief"
    assert {metric.name for metric in record.converted.metrics} == {"kl_to_pretrained", "agreement"}
    assert "belief" in (out / "README.md").read_text()
    assert "<table" in (out / "conversion.html").read_text()
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    stock = AutoModelForSequenceClassification.from_pretrained(tiny_bert).eval()
    inputs = AutoTokenizer.from_pretrained(out)(list(WORDS), padding=True, return_tensors="pt")
    with torch.no_grad():
        assert not torch.equal(model(**inputs).logits, stock(**inputs).logits)
    assert model.config.attn_swap["swaps"][0]["retrained"] is True
    assert not out.with_name("out.part").exists()
    assert "exists and is not an empty folder" in command("convert", tiny_bert, "belief", out, "--data", texts).err


def test_a_missed_budget_saves_nothing(command: Command, tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("convert", tiny_bert, "simpletron", out, "--data", texts, "--tokens", "300", "--task", "AutoModel")
    words += ("--device", "cpu", "--max-loss", "0.0000001%", "--layers", "0-1")
    outcome = command(*words)
    assert outcome.code == 1
    assert "NOT within the budget" in outcome.out
    assert last_lines(outcome)[-1].startswith("nothing was saved: ")
    assert not out.exists()
    again = command(*words, "--keep-anyway")
    assert again.code == 1
    assert (out / "model.safetensors").exists()
    assert again.out == outcome.out


def test_a_budget_that_is_met_at_once(command: Command, tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    words = ("convert", tiny_bert, "belief", tmp_path / "out", "--data", texts, "--max-loss", "100%")
    outcome = command(*words, "--bf16", "--device", "cpu")
    assert outcome.code == 0
    report = json.loads((tmp_path / "out/conversion.json").read_text())
    assert sum(step["tokens"] for step in report["steps"]) == 0
    assert report["met"] is True
    assert RunResult.load(tmp_path / "out/results.json").steps == ()
    assert "autocast" not in (tmp_path / "out/README.md").read_text(), "nothing was trained"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("MODEL", "bogus", "out", "--data", "TEXTS"), "unknown variant"),
        (("MODEL", "belief", "out", "--data", "nowhere.csv"), "there is no file 'nowhere.csv'"),
        (("MODEL", "belief", "out", "--data", "BLANK"), "every text is blank"),
        (("MODEL", "belief", "out", "--data", "TEXTS", "--column", "words"), "has no column 'words'"),
        (("MODEL", "belief", "out", "--data", "TEXTS", "--tokens", "many"), "a number such as 300k"),
        (("MODEL", "belief", "out", "--data", "TEXTS", "--max-loss", "little"), "a share such as 2%"),
        (("MODEL", "belief", "out", "--data", "TEXTS", "--max-loss", "2"), "at most 100%, got '2'"),
        (("MODEL", "belief", "out", "--data", "TEXTS", "--layers", "0-9"), "layers"),
        (("MODEL", "belief", "out", "--data", "TEXTS", "--keep", "1"), "keep is the share of layers"),
        (("MODEL", "belief", ".", "--data", "TEXTS"), "exists and is not an empty folder"),
        (("CONVERTED", "modern_hopfield", "out", "--data", "TEXTS"), "is converted already"),
        (("MODEL", "belief", "out", "--data", "TEXTS", "--task", "image-classification"), "does not fit"),
        (
            ("MODEL", "belief", "out", "--data", "TEXTS", "--task", "causal-lm"),
            "AutoModelForCausalLM would run with random ones",
        ),
    ],
    ids=lambda value: " ".join(value[3:]) if isinstance(value, tuple) else None,
)
def test_refusals_are_one_line(
    command: Command,
    tiny_bert: Path,
    texts: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    blank = tmp_path / "blank.csv"
    blank.write_text('text,label\n" ",1\n" ",0\n')
    names = {"MODEL": tiny_bert, "TEXTS": texts, "BLANK": blank, "CONVERTED": tmp_path / "converted"}
    if "CONVERTED" in arguments:
        assert command("patch", tiny_bert, "belief", names["CONVERTED"]).code == 0
    outcome = command("convert", *(names.get(word, word) for word in arguments), "--device", "cpu")
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert outcome.code == 2
    assert outcome.out == ""
    assert len(errors) == 1
    assert reason in errors[0]
    assert "Traceback" not in outcome.err
    assert not (tmp_path / "out").exists()


def test_compare_says_what_was_lost(command: Command, tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    stock = AutoModelForSequenceClassification.from_pretrained(tiny_bert).eval()
    other = AutoModelForSequenceClassification.from_pretrained(tiny_bert).eval()
    torch.nn.init.normal_(other.classifier.weight, generator=torch.Generator().manual_seed(0))
    other.save_pretrained(tmp_path / "other")
    outcome = command("compare", tiny_bert, tmp_path / "other", "--data", texts, "--rows", "20", "--json")
    assert outcome.code == 0
    report = json.loads(outcome.out)
    rows = [line.split(",")[0] for line in texts.read_text().splitlines()[1:21]]
    inputs = AutoTokenizer.from_pretrained(tiny_bert)(rows, padding=True, return_tensors="pt")
    with torch.no_grad():
        ours, theirs = (model(**inputs).logits.log_softmax(-1) for model in (other, stock))
    wanted = float((theirs.exp() * (theirs - ours)).sum(-1).mean())
    assert wanted > 0.01
    assert report["tokens"] == 20
    assert report["divergence"] == pytest.approx(wanted, rel=1e-3)
    assert report["time_ratio"] > 0
    same = command("compare", tiny_bert, tiny_bert, "--data", texts)
    assert "Same first choice as the stock model: 100.0%" in same.out


def test_compare_in_8_bits(command: Command, tiny_llama: Path, texts: Path, tmp_path: Path) -> None:
    """Each model beside the first in full precision, with ranges from the rows behind those that are measured."""
    data = tmp_path / "long.csv"
    data.write_text(texts.read_text() + "\n".join(texts.read_text().splitlines()[1:] * 10) + "\n")
    patch_model(AutoModelForCausalLM.from_pretrained(tiny_llama), "belief").save_pretrained(tmp_path / "other")
    words = ("compare", tiny_llama, tmp_path / "other", "--data", data, "--rows", "4", "--length", "16", "--in-8-bits")
    report = json.loads(command(*words, "--json").out)
    stream = [word for line in data.read_text().splitlines()[1:] for word in line.split(",")[0].split()]
    ids = torch.tensor(AutoTokenizer.from_pretrained(tiny_llama).convert_tokens_to_ids(stream)[: 8 * 16]).view(8, 16)
    stock = AutoModelForCausalLM.from_pretrained(tiny_llama).eval()
    with torch.no_grad():
        plain = float(stock(input_ids=ids[:4], labels=ids[:4]).loss)
        for name, folder in (("first", tiny_llama), ("second", tmp_path / "other")):
            model = AutoModelForCausalLM.from_pretrained(folder).eval()
            with machine_w8a8(model, [{"input_ids": ids[4:]}]):
                rounded = float(model(input_ids=ids[:4], labels=ids[:4]).loss)
            assert report[name]["loss_in_8_bits"] == pytest.approx(math.exp(rounded - plain) - 1, rel=1e-3)
    assert abs(report["first"]["loss_in_8_bits"]) > 1e-4
    printed = command(*words).out
    assert (
        f"{report['first']['loss_in_8_bits']:.2%} lost by the first, {report['second']['loss_in_8_bits']:.2%}"
        in printed
    )
    assert "The largest activation of the second, after layer " in printed
    assert "no rows are left" in command(*words[:5], "--rows", "1000", "--in-8-bits").err


def test_the_card_of_a_folder(command: Command, tiny_llama: Path, long_texts: Path, tmp_path: Path) -> None:
    """It has recall, names no control, and links to no folder; --base-model gives the name on the Hub."""
    words = ("--data", long_texts, "--length", "64", "--tokens", "1", "--no-absorb", "-o", "window=4")
    assert command("convert", tiny_llama, "window", tmp_path / "out", *words).code == 0
    lost = json.loads((tmp_path / "out/conversion.json").read_text())["steps"][-1]["lost"]
    record = RunResult.load(tmp_path / "out/results.json")
    assert record.control is None
    assert record.stock is not None
    ours, theirs = (
        next(metric for metric in measured.metrics if metric.name == "recall_after_200")
        for measured in (record.converted, record.stock)
    )
    assert (ours.values, theirs.values) == ((lost["recall"],), (lost["stock_recall"],))
    card = (tmp_path / "out/README.md").read_text()
    assert "| recall_after_200 (higher is better) |" in card
    assert "trained the same way." not in card
    assert "\n`tiny-llama` with its softmax attention replaced by **window**" in card
    assert "huggingface.co/tiny-llama" not in card
    assert "base_model" not in card
    assert command("convert", tiny_llama, "window", tmp_path / "named", *words, "--base-model", "me/llama").code == 0
    named = (tmp_path / "named/README.md").read_text()
    assert "[`me/llama`](https://huggingface.co/me/llama) with its softmax attention replaced" in named
    assert "base_model: me/llama\n" in named
    wrong = command("convert", tiny_llama, "window", tmp_path / "wrong", *words, "--base-model", "no name")
    assert "'no name'" in wrong.err
    assert "loading" not in wrong.err, "it is refused before the conversion"


READS = """
import sys, torch
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained(sys.argv[1]).eval()
torch.save(model(torch.arange(6)[None]).logits, sys.argv[2])
assert not any(name.startswith("hf_attn_swap") for name in sys.modules)
"""


def test_quantize_saves_integers(command: Command, tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    """Nothing is swapped in it, so transformers loads it without this package."""
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed (extra quant)")
    out = tmp_path / "out"
    words = ("--data", texts, "--length", "16", "--device", "cpu", "--base-model", "me/tiny-bert")
    outcome = command("quantize", tiny_bert, out, *words)
    assert outcome.code == 0, outcome.err
    report = json.loads((out / "conversion.json").read_text())
    names = [step["name"] for step in report["steps"]]
    assert names[0] == "stock model in 8 bits"
    assert names[-1] == "8-bit integers"
    assert all(name in outcome.out for name in names)
    weights = load_file(out / "model.safetensors")
    queries = {name: value.dtype for name, value in weights.items() if name.endswith("query.weight")}
    assert set(queries.values()) == {torch.int8}
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"
    assert RunResult.load(out / "results.json").variant == "softmax"
    card = (out / "README.md").read_text()
    assert "pip install compressed-tensors" in card
    assert "import hf_attn_swap" not in card
    assert "replaced" not in card
    assert "base_model_relation: quantized" in card
    assert "8-bit integers: " in card
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert not {"attn_swap", "attn_implementation", "auto_map"} & config.keys()
    assert not any(name.endswith(".py") or "attn_swap" in name for name in [*weights, *map(str, out.iterdir())])
    python("-c", READS, out, tmp_path / "logits")
    model = int8_loaded(AutoModelForSequenceClassification.from_pretrained(out)).eval()
    with torch.no_grad():
        wanted = model(torch.arange(6)[None]).logits
    assert (torch.load(tmp_path / "logits") - wanted).norm() < 1e-5 * wanted.norm()


def test_quantize_needs_what_loads_its_result(
    command: Command, tiny_bert: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(converted, "is_compressed_tensors_available", lambda: False)
    outcome = command("quantize", tiny_bert, tmp_path / "out", "--data", texts)
    assert outcome.code == 2
    assert 'pip install "hf-attn-swap[quant] @ git+https://' in outcome.err
    assert not (tmp_path / "out").exists()


def test_measures_read_the_first_rows_with_their_labels(
    tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many are asked for: of as long data, a conversion takes rows at random places."""
    monkeypatch.setattr(rows_module, "MOST_ROWS", 10)
    places = range(60)
    data = tmp_path / "rows.parquet"
    model: Any = AutoModelForSequenceClassification.from_pretrained(tiny_bert)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_bert)
    held = {"text": ["film " * (place + 1) for place in places], "label": [place % 2 for place in places]}
    Dataset.from_dict(held).to_parquet(str(data))

    def read(label: str | None, skipped: int) -> list[dict[str, Any]]:
        more = (label, None, None, None, 30, 100)
        return measures._batches(model, tokenizer, str(data), ["text"], *more, skipped=skipped)

    def sizes(batch: dict[str, Any]) -> torch.Tensor:
        return batch["attention_mask"].sum(1) - 2

    labelled = read("label", 0)
    assert sorted(torch.cat(list(map(sizes, labelled))).tolist()) == list(range(1, 31))
    for batch in labelled:
        assert torch.equal(batch["labels"], (sizes(batch).long() - 1) % 2)
    assert sorted(torch.cat(list(map(sizes, read(None, 30)))).tolist()) == list(range(31, 61)), "behind those"


@pytest.mark.parametrize("more", [("--stream",), ("--split", "train[:50%]")])
def test_rows_to_work_on_are_no_held_out_rows(
    more: tuple[str, ...], command: Command, tiny_bert: Path, tmp_path: Path
) -> None:
    """A folder without a held-out split, and a file, give all of train; with a split for tests, that is taken."""
    folder = tmp_path / "folder"
    folder.mkdir()
    lines = "".join(json.dumps({"text": word}) + "\n" for word in WORDS * 8)
    (folder / "train.jsonl").write_text(lines)
    file = folder / "train.jsonl"
    words = ("convert", tiny_bert, "belief", tmp_path / "out", "--tokens", "1", "--device", "cpu", *more)
    for data, again in ((folder, folder), (file, folder / ".." / "folder" / "train.jsonl")):
        outcome = command(*words, "--data", data, "--eval-data", again)
        assert outcome.code == 2
        assert "its held-out rows would be those" in outcome.err
    (folder / "test.jsonl").write_text(lines)
    assert command(*words, "--data", folder, "--eval-data", folder).code == 0


def test_convert_a_stream(command: Command, tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    data = tmp_path / "texts.jsonl"  # datasets leaves a CSV file open
    lines = (line.partition(",")[0] for line in texts.read_text().splitlines()[1:])
    data.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    held = tmp_path / "held.jsonl"
    held.write_text("".join(json.dumps({"text": f"the {word}"}) + "\n" for word in WORDS * 6))
    words = ("--data", data, "--tokens", "200", "--device", "cpu", "--eval-data", held, "--eval-tokens", "50")
    assert command("convert", tiny_bert, "belief", tmp_path / "out", *words, "--stream").code == 0
    report = json.loads((tmp_path / "out" / "conversion.json").read_text())
    assert report["train_rows"] == len(WORDS) ** 2
    assert report["held_out"] < 15
    assert "a part of the held-out data" in report["said"][0]
    split = command("convert", tiny_bert, "belief", tmp_path / "no", *words, "--stream", "--split", "train[:50%]")
    assert (split.code, "which a stream does not have" in split.err) == (2, True)
    part = command("convert", tiny_bert, "belief", tmp_path / "part", *words, "--split", "train[:50%]")
    assert part.code == 0
    report = json.loads((tmp_path / "part" / "conversion.json").read_text())
    assert report["train_rows"] == len(WORDS) ** 2 // 2
