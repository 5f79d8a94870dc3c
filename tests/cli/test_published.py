"""What the demo publishes: a results.json with its control, from which a valid card renders."""

from __future__ import annotations

from pathlib import Path

from hf_attn_swap import patch_model
from hf_attn_swap.demo.data import Sentences
from hf_attn_swap.demo.options import DemoOptions
from hf_attn_swap.demo.published import demo_result
from hf_attn_swap.demo.report import Row
from hf_attn_swap.publish.card import render, validate
from hf_attn_swap.publish.results import RunResult
from tests import zoo


def row(variant: str, accuracy: float) -> Row:
    return Row(
        variant=variant,
        accuracy=accuracy,
        accuracy_95=(0.7, 0.9),
        difference=0.0,
        difference_95=(-0.1, 0.1),
        train_step_ms=10.0,
        time_ratio=1.25,
        parameters_added=0,
        kurtosis=12.5,
        max_inf_norm=7.5,
        train_loss=0.5,
        train_seconds=3.0,
    )


def test_card_of_the_demo(tmp_path: Path) -> None:
    sentences = Sentences(name="made", classes=["bad", "good"], train=[("a", 0)] * 40, test=[("b", 1)] * 10)
    model = patch_model(zoo.build("bert", head="classification"), "outeffhop+gated")
    rows = [row("softmax", 0.8125), row("outeffhop+gated", 0.8375)]
    result = demo_result(DemoOptions(), rows, sentences, model, 60.0)
    result.save(tmp_path / "results.json")
    again = RunResult.load(tmp_path / "results.json")
    assert again == result
    assert again.control is not None
    assert again.control.metrics[0].mean == 0.8125
    assert again.budget.steps == 3
    text = render(again)
    validate(text)
    assert "0.8375" in text
    assert "outeffhop+gated" in text
