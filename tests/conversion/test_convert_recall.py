"""Recall in a conversion: where it is measured, the layers that it keeps, the budget for it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_attn_swap import layer_sensitivity, patch_model
from hf_attn_swap.conversion.report import Sensitivity
from hf_attn_swap.conversion.sensitivity import reach_of
from hf_attn_swap.layer.registry import list_variants
from hf_attn_swap.measuring.lost import Lost
from hf_attn_swap.measuring.recall import Passages, Recall
from hf_attn_swap.wiring.install import installation_of, model_root
from tests.contract.harness import refused, swaps

from .converting import GAIN, WINDOW, converted, long, rows, same, stock, text, weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT


def planted(monkeypatch: pytest.MonkeyPatch, place: int) -> list[int]:
    """From now on, this layer alone recalls; the others lose a hundredth each. Gives the distances that are asked."""
    asked: list[int] = []

    def measure(self: Passages, model: Any, *, progress: bool = False) -> Recall:
        (distance,) = self.texts
        asked.append(distance)
        found = installation_of(model_root(model))
        running = [] if found is None else [layer.number for layer in found.layers() if layer.swap.strength > 0]
        gain = GAIN - sum(0.9 * GAIN if number == place else 0.01 * GAIN for number in running)
        return Recall(gains={distance: (gain, gain)})

    monkeypatch.setattr(Passages, "measure", measure)
    return asked


@pytest.fixture(scope="module")
def cheapest() -> int:
    """The layer that costs least by KL."""
    batch = {"input_ids": torch.stack([row["input_ids"] for row in text(3)])}  # 192 tokens: too few for recall
    found = layer_sensitivity(patch_model(long(), "window", **WINDOW), batch, progress=False)
    assert found.together.recall is None
    assert "recall" not in str(found)
    return found.order[0]


def test_the_layer_that_recalls_stays(monkeypatch: pytest.MonkeyPatch, cheapest: int) -> None:
    """It is the cheapest by KL."""
    asked = planted(monkeypatch, cheapest)
    report = converted(long(), "window", text(), keep=0.34, tokens=1, **WINDOW)
    assert set(asked) == {200}
    assert set(report.kept) == {cheapest}
    assert report.sensitivity is not None
    assert (
        min(report.sensitivity.alone.values(), key=lambda lost: lost.divergence_or_error)
        is report.sensitivity.alone[cheapest]
    )
    assert report.sensitivity.alone[cheapest].recall == pytest.approx(0.1 * GAIN)
    first, last = str(report.sensitivity).splitlines()[2:4], str(report.sensitivity).splitlines()[4]
    assert [line.split()[-1] for line in first] == ["0.03", "0.03"]
    assert last.split() == [str(cheapest), f"{report.sensitivity.alone[cheapest].degradation:.3g}", "2.7"]
    assert report.lost.recall == pytest.approx(0.98 * GAIN)
    header, swapped, *_, chosen = str(report).splitlines()[1 : 2 + len(report.steps)]
    assert header.endswith("recall after 200")
    assert swapped.endswith("0.24 of 3.00")
    assert chosen.endswith("2.94 of 3.00")


def test_the_order_is_by_the_sum_of_shares() -> None:
    def lost(kl: float, recall: float | None) -> Lost:
        return Lost(tokens=1, divergence=kl, recall=recall, stock_recall=None if recall is None else 2.0)

    def order(*layers: Lost) -> tuple[int, ...]:
        return Sensitivity(variant="window", alone=dict(enumerate(layers)), together=lost(0.1, 1.0)).order

    # shares of KL 0.5, 0.3, 0.2, and of recall 0.1, 0.2, 0.7
    assert order(lost(0.05, 1.9), lost(0.03, 1.8), lost(0.02, 1.3)) == (1, 0, 2)
    assert order(lost(0.05, None), lost(0.03, None), lost(0.02, None)) == (2, 1, 0)
    # what gains recall counts as no loss, so KL decides between the first two
    assert order(lost(0.05, 2.0), lost(0.03, 2.9), lost(0.02, 1.3)) == (1, 0, 2)
    assert order(lost(0.05, 2.9), lost(0.03, 2.0), lost(0.02, 2.1)) == (2, 1, 0)


def test_where_recall_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """In causal language models, where keys are hidden; and where a budget asks for it."""
    asked = planted(monkeypatch, 0)
    assert converted(long(), "simpletron_resl", text(), tokens=1).lost.stock_recall == GAIN
    wide = converted(long(), "window", text(), tokens=1, window=250)
    assert (wide.lost.recall_distance, asked[-1]) == (250, 250)
    asked.clear()
    report = converted(long(), "belief", text(), keep=0.34, tokens=1)
    assert (report.lost.recall, asked) == (None, [])
    assert "recall" not in str(report)
    assert converted(stock("bert"), "simpletron_resl", rows("bert"), keep=0.34, tokens=1).lost.recall is None
    assert not asked
    assert converted(long(), "belief", text(), min_recall=0.1, tokens=1).lost.recall_distance == 200


def test_texts_that_are_too_short_are_said() -> None:
    report = converted(stock("llama"), "window", rows("llama"), tokens=1, **WINDOW)
    assert report.lost.recall is None
    assert "Recall was not measured: a passage of 96 tokens and 200 tokens after it do not fit: " in str(report)


@pytest.mark.parametrize("layers", ["auto", [0, 1, 2]])
def test_a_budget_for_recall(monkeypatch: pytest.MonkeyPatch, cheapest: int, layers: Any) -> None:
    planted(monkeypatch, cheapest)
    report = converted(long(), "window", text(), min_recall=0.97, layers=layers, tokens=1, **WINDOW)
    if layers == "auto":
        assert report.kept == {cheapest: "the loss would be above the budget"}
        assert report.met
        assert report.summary.endswith("(within the budget of 97% of recall).")
        assert report.lost.recall_share == pytest.approx(0.98)
    else:
        assert not report.met
        assert report.summary.endswith("(NOT within the budget of 97% of recall).")
        assert report.advice() == ["To convert more layers, or to lose less, allow more tokens or a looser budget."]
    assert converted(long(), "window", text(), min_recall=0.05, tokens=1, **WINDOW).met


def test_how_far_a_variant_reaches() -> None:
    for name in list_variants():
        hides = name == "window" or name.startswith("simpletron")
        assert (reach_of(name, {}) is not None) == hides, name
    assert reach_of("window", {"window": 300}) == 300
    assert reach_of("outeffhop+window", {"window": {"window": 7}}) == 7
    assert reach_of("simpletron_resl", {}) == 0


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (0, 1.5, "97%"):
        with refused("min_recall is a share above 0 and at most 1 (0.97 is 97 %)"):
            converted(long(), "window", text(), min_recall=value, **WINDOW)
    with refused("min_recall: recall is measured by the next token; BertForMaskedLM is no causal language model."):
        converted(stock("bert"), "outeffhop", rows("bert"), min_recall=0.97)
    with refused("min_recall: a passage of 96 tokens and 200 tokens after it do not fit"):
        converted(stock("llama"), "window", rows("llama"), min_recall=0.97, **WINDOW)
    for value in (0, 2.5, "2k"):
        with refused("recall_distance must be a whole number"):
            converted(long(), "window", text(), recall_distance=value, **WINDOW)
    with refused("recall_distance: recall is measured by the next token; BertForMaskedLM is no causal language model."):
        converted(stock("bert"), "outeffhop", rows("bert"), recall_distance=64)
    with refused("recall_distance: a query sees the last 200 keys, and so the whole passage of 96 tokens after 104 "):
        converted(long(), "window", text(), recall_distance=104, tokens=1, window=200)
    with refused("recall_distance: a passage of 96 tokens and 9999 tokens after it do not fit"):
        converted(long(), "window", text(), recall_distance=9999, **WINDOW)
    monkeypatch.setattr(Passages, "measure", lambda self, model, progress: Recall(gains={200: (-0.1,)}))
    model, before = long(), weights(long())
    with refused("min_recall: the stock model gains nothing when a passage is read again (-0.1 nats per token)"):
        converted(model, "window", text(), min_recall=0.97, **WINDOW)
    assert same(weights(model), before)
    assert not swaps(model)
