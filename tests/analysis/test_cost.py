"""What a pass costs: the models take turns, and the figures are medians of the rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from hf_attn_swap.analysis import cost
from tests.contract.harness import refused


class Clock:
    """A clock that only the models below move on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.calls: list[str] = []


class Timed(nn.Module):
    """A model that takes so many milliseconds per column of its batch; the very first pass takes far longer."""

    def __init__(self, name: str, clock: Clock, milliseconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.again = nn.ParameterList([self.weight])
        self.name, self.clock, self.milliseconds = name, clock, milliseconds

    def forward(self, x: torch.Tensor) -> None:
        assert not self.training
        warm = self.name in self.clock.calls
        self.clock.calls.append(self.name)
        self.clock.seconds += (self.milliseconds * x.shape[1] if warm else 5_000) / 1e3


def test_the_models_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(cost.time, "perf_counter", lambda: clock.seconds)
    models = Timed("first", clock, 10), Timed("second", clock, 30)
    batches: list[dict[str, Any]] = [{"x": torch.ones(2, width), "labels": None} for width in (1, 2)]
    (first, second), ratio = cost.compare_costs(*models, batches)
    assert (first.milliseconds, second.milliseconds) == (pytest.approx(10), pytest.approx(30))
    assert ratio == pytest.approx(3)
    assert (first.parameter_bytes, first.peak_bytes) == (6, None)
    rounds = [tuple(clock.calls[place : place + 2]) for place in range(0, len(clock.calls), 2)]
    assert len(rounds) == cost.ROUNDS + 1
    assert set(rounds) == {("first", "second"), ("second", "first")}
    assert all(model.training for model in models)
    with refused("no batches"):
        cost.compare_costs(*models, [])
