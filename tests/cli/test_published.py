"""What the demo publishes: a results.json with its control, from which a valid card renders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from transformers import AutoTokenizer

from hf_attn_swap.demo.data import load_sentences
from hf_attn_swap.demo.options import DemoOptions
from hf_attn_swap.demo.published import demo_result
from hf_attn_swap.demo.report import make_rows
from hf_attn_swap.demo.train import set_up
from hf_attn_swap.publish.card import render, validate
from hf_attn_swap.publish.results import RunResult


def test_card_of_the_demo(options: DemoOptions, tiny_bert: Path, tmp_path: Path) -> None:
    options = replace(options, variants=("outeffhop+gated",), model=None)
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
    assert again.budget.steps == options.train_size // options.batch_size
    text = render(again)
    validate(text)
    assert f"{rows[1].accuracy:g}" in text
    assert "outeffhop+gated" in text
