"""`convert` tries a sink beside the variant in a causal language model, and keeps it if less is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_attn_swap import convert, patch_model, quantize
from hf_attn_swap.conversion import sink as module
from hf_attn_swap.conversion.run import Run
from hf_attn_swap.variants.sink import Sink
from tests.contract.harness import batch_of, distance, forward, fresh, swaps

from .converting import Killed, names
from .letters import Letters

LETTERS = Letters()
ROWS = [
    {"input_ids": torch.randint(3, 60, (24,), generator=torch.Generator().manual_seed(seed)).tolist()}
    for seed in range(24)
]


def converted(model: Any, variant: str, data: Any = ROWS, **more: Any) -> Any:
    return convert(model, variant, data, **({"processor": LETTERS, "tokens": 1, "progress": False} | more))


def llama() -> Any:
    return fresh("llama", torch.float32, head="lm")


@pytest.fixture
def helps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The perplexity is so many times the stock model's, as swapped and with an absorbed sink: the list has both."""
    ratio = [1.3, 0.5]
    measured = Run.lost

    def lost(state: Run) -> Any:
        found = measured(state)
        sinks = [swap.at("keys") for group in state.swaps.values() for swap in group]
        absorbed = all(isinstance(sink, Sink) and sink.learned.value.any() for sink in sinks)
        assert found.stock_perplexity is not None
        return replace(found, perplexity=found.stock_perplexity * ratio[absorbed])

    monkeypatch.setattr(Run, "lost", lost)
    return ratio


@pytest.mark.parametrize("variant", ["modern_hopfield", "sink", "outeffhop+belief"])
def test_a_sink_that_helps_is_kept(variant: str, helps: list[float]) -> None:
    report = converted(model := llama(), variant)
    assert names(report)[:2] == ["swap", "sink absorbed"]
    assert set(report.variant.split("+")) == {"sink", *variant.split("+")}
    assert "stand before every text" in str(report)
    assert {"+".join(swap.names) for swap in swaps(model)} == {report.variant}
    first = torch.tensor([ROWS[0]["input_ids"]])
    token = int(report.said[0].split("<")[1].split(">")[0])
    module.absorb_rows(alone := patch_model(llama(), report.variant), LETTERS, [first], tokens=[token])
    for one, other in zip(swaps(model), swaps(alone), strict=True):
        assert torch.equal(one.at("keys").learned.key, other.at("keys").learned.key)


def test_padding_is_no_text(helps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[list[int]] = []

    def noted(model: Any, processor: Any, texts: Any, **more: Any) -> Any:
        read.extend(text[0].tolist() for text in texts)
        raise ValueError("seen.")

    monkeypatch.setattr(module, "absorb_rows", noted)
    rows = [
        {"input_ids": [0] * 4 + row["input_ids"], "attention_mask": [0] * 4 + [1] * len(row["input_ids"])}
        for row in ROWS
    ]
    converted(llama(), "belief", data=rows)
    assert len(read) == module.TEXTS
    assert all(0 not in text for text in read)


def test_a_sink_that_costs_is_left_out() -> None:
    """Here the first token is no sink, so that one more key takes from the others."""
    with_it = converted(one := llama(), "belief")
    without = converted(other := llama(), "belief", absorb=False)
    assert names(with_it) == names(without)
    assert with_it.variant == without.variant == "belief"
    assert with_it.said == ()
    batch = batch_of("llama", torch.float32)
    assert torch.equal(forward(one, batch), forward(other, batch))


@pytest.mark.parametrize(
    "more",
    [
        {"absorb": False},
        {"layers": [0, 1]},
        {"keep": 0.4},
        {"processor": None},
        {"variant": "simpletron_resl"},
    ],
    ids=str,
)
def test_no_sink_is_tried(more: dict[str, Any], helps: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "absorb_rows", lambda *_, **__: pytest.fail("a sink was tried"))
    arguments = {"variant": "belief"} | more
    report = converted(llama(), arguments.pop("variant"), **arguments)
    assert "sink" not in report.variant


def test_a_budget_takes_a_sink_that_is_within(helps: list[float]) -> None:
    """Else groups of layers are chosen, and layers that keep their own attention would have no sink."""
    report = converted(llama(), "belief", max_loss=0.02)
    assert names(report) == ["swap", "sink absorbed"]
    assert report.met
    helps[:] = 1.3, 1.2
    assert "sink" not in converted(llama(), "belief", max_loss=0.02).variant
    helps[:] = 1.01, 0.5
    assert names(converted(llama(), "belief", max_loss=0.02)) == ["swap"]


@pytest.mark.parametrize("max_loss", [None, 0.02])
@pytest.mark.parametrize("ratio", [1.2, 1.4])
def test_a_sink_in_8_bits_is_measured_once(
    ratio: float, max_loss: float | None, helps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget does not refuse it: channels that are smoothed afterwards may bring the loss within it."""
    helps[:] = 1.3, ratio
    measured, calls = Run.lost, []
    monkeypatch.setattr(Run, "lost", lambda state: calls.append(state) or measured(state))
    report = quantize(llama(), ROWS, LETTERS, max_loss=max_loss, progress=False)
    kept = ratio < 1.3
    with_sink = "in 8 bits, with a sink" if kept else "in 8 bits, with a sink, taken back"
    assert names(report)[:2] == ["stock model in 8 bits", with_sink]
    assert report.steps[1].lost.degradation == pytest.approx(min(1.3, ratio) - 1)
    assert report.variant == ("sink" if kept else "softmax")
    assert [row.name.startswith("in 8 bits, smoothed") for row in report.steps].index(True) == 2
    assert len(calls) == 4, "stock, with a sink, smoothed, in integers"


def test_a_model_that_takes_no_sink_is_rounded_without_one() -> None:
    report = quantize(fresh("opt", torch.float32, head="lm"), ROWS, LETTERS, progress=False)
    assert names(report)[:2] == ["stock model in 8 bits", "in 8 bits, with a sink, taken back"]
    assert report.steps[1].lost == report.steps[0].lost
    assert any("positions do not count relatively" in line for line in report.notes())


def test_a_model_that_takes_no_sink_says_why(helps: list[float]) -> None:
    model = fresh("gpt2", torch.float32, head="lm")
    report = converted(model, "belief")
    assert report.variant == "belief"
    assert any("positions do not count relatively" in line for line in report.notes())


def test_a_killed_conversion_goes_on_with_its_sink(
    tmp_path: Path, helps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = converted(one := llama(), "belief", output_dir=tmp_path / "whole")
    folder = tmp_path / "killed"
    searches, absorb_rows = [], module.absorb_rows

    def killed(*given: Any, tokens: Any = None) -> Any:
        if tokens is not None:
            raise Killed
        searches.append(given)
        return absorb_rows(*given)

    with monkeypatch.context() as patched:
        patched.setattr(module, "absorb_rows", killed)
        with pytest.raises(Killed):
            converted(llama(), "belief", output_dir=folder)
    assert len(searches) == 1

    def puts(*given: Any, tokens: Any = None) -> Any:
        assert tokens is not None, "the sink was searched again"
        return absorb_rows(*given, tokens=tokens)

    monkeypatch.setattr(module, "absorb_rows", puts)
    again = converted(other := llama(), "belief", output_dir=folder)
    assert names(again) == names(whole)
    assert again.said == whole.said
    batch = batch_of("llama", torch.float32)
    assert distance(forward(one, batch), forward(other, batch)) == 0
