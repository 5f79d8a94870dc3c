"""What the demo publishes: a results.json with its control, from which a valid card renders."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoTokenizer

from hf_attn_swap.demo.data import load_sentences
from hf_attn_swap.demo.options import DemoOptions
from hf_attn_swap.demo.published import demo_result
from hf_attn_swap.demo.report import make_rows
from hf_attn_swap.demo.train import set_up
from hf_attn_swap.publish.card import render, validate
from hf_attn_swap.publish.results import RunResult


def test_card_of_the_demo(tiny_bert: Path, labelled_texts: Path, tmp_path: Path) -> None:
    options = DemoOptions(
        variants=("outeffhop+gated",),
        dataset=str(labelled_texts),
        text_column="sentence",
        label_column="sentiment",
        train_size=40,
        test_size=16,
        batch_size=16,
        learning_rate=1e-3,
    )
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    setup = set_up(options, load_sentences(options), tokenizer, str(tiny_bert), tmp_path / "runs")
    outcomes = {name: setup.fine_tune(name) for name in ("softmax", "outeffhop+gated")}
    rows = make_rows(outcomes, {"softmax": [8.0, 8.0], "outeffhop+gated": [10.0, 10.0]})
    result = demo_result(setup, rows[1], outcomes["outeffhop+gated"], outcomes["softmax"])
    result.save(tmp_path / "results.json")
    again = RunResult.load(tmp_path / "results.json")
    assert again == result
    assert (again.name, again.study) == ("minilm-rotten-tomatoes-outeffhop-gated", "minilm-rotten-tomatoes")
    assert again.steps == ("schedule",)
    assert again.control is not None
    assert again.control.metrics[0].mean == rows[0].accuracy
    assert again.converted.outliers is not None
    assert [metric.name for metric in again.converted.outliers] == ["kurtosis", "max_inf_norm"]
    assert again.difference is not None
    assert again.cost is not None
    assert again.cost.ratio == 1.25
    assert again.budget.steps == 3
    text = render(again)
    validate(text)
    assert f"{rows[1].accuracy:g}" in text
    assert "outeffhop+gated" in text
