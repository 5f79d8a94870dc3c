"""Writes the demo's best model as a `results.json`, so that the model can be pushed with a card."""

from __future__ import annotations

from dataclasses import replace

from ..publish.results import Cost, RunResult
from ..training import About, Outcome
from ..training.publish import publish
from .report import Row
from .train import Setup

ABOUT = About(
    prefix="minilm-rotten-tomatoes",
    task="text-classification",
    auto_class="AutoModelForSequenceClassification",
    intended_use="Shows a conversion end to end; a sentiment classifier of short English film reviews.",
)
LIMITS = (
    "One seed, one small training set and one learning rate: another seed would change the difference to the control.",
    "It was kept as the best of the demo's converted models on the same test sentences, which flatters it a little.",
    "Trained on short film reviews only.",
)


def demo_result(setup: Setup, best: Row, converted: Outcome, control: Outcome) -> RunResult:
    """The run of the best converted model, next to the control that was trained the same way."""
    steps = setup.conversion(best.variant).steps
    model = setup.model(best.variant)
    result = publish([converted], [control], ABOUT, model, setup.data, setup.training, steps=steps)
    cost = Cost(ratio=best.time_ratio, of="forward and backward of one held-out batch, models taking turns")
    return replace(result, cost=cost, limits=LIMITS)
