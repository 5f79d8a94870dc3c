"""The engine of a conversion: what is applied is measured, written into the journal, and undone on an error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_attn_swap.conversion import convert as module
from hf_attn_swap.conversion.journal import Journal
from hf_attn_swap.conversion.run import Run
from hf_attn_swap.measuring.lost import Lost
from tests.contract.harness import refused, swaps

from .converting import Killed, converted, rows, same, stock, timeless, weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
ROW = 3  # of the embedding that the toy step changes


def embedding(model: Any) -> torch.nn.Parameter:
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, torch.nn.Parameter)
    return weight


def scale_a_row(run: Run, factor: float) -> None:
    weight = embedding(run.model)
    run.keep([weight])
    with torch.no_grad():
        weight[ROW] *= factor


def after_the_fit(monkeypatch: pytest.MonkeyPatch, step: Callable[[Run], object]) -> None:
    """Put one more step behind the fit."""
    fit = module.fit_heads

    def fit_and_more(run: Run) -> None:
        fit(run)
        step(run)

    monkeypatch.setattr(module, "fit_heads", fit_and_more)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A toy step, which changes a weight; the list has an entry for each run of it."""
    calls: list[str] = []

    def halve_a_row(run: Run) -> int:
        calls.append("halve a row")
        scale_a_row(run, 0.5)
        return ROW

    def step(run: Run) -> None:
        assert run.apply("halve a row", lambda: halve_a_row(run)) == ROW

    after_the_fit(monkeypatch, step)
    return calls


def test_the_docstring_names_the_steps() -> None:
    named = [line.split() for line in str(module.__doc__).splitlines() if line.strip()[:2].rstrip(".").isdigit()]
    called = [name for name in module.convert_steps.__code__.co_names if callable(getattr(module, name, None))]
    assert [words[1].rstrip(":") for words in named] == called


def test_a_toy_step_is_run_and_reported(ran: list[str]) -> None:
    model, before = stock("bert"), embedding(stock("bert")).detach().clone()
    report = converted(model, "outeffhop", rows("bert"), tokens=0)
    assert [step.name for step in report.steps][2:] == ["halve a row"]
    assert report.steps[2].lost != report.steps[1].lost
    assert len(ran) == 1
    assert torch.equal(embedding(model)[ROW], before[ROW] / 2)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_toy_step_is_undone_after_an_error(name: str, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In a later step, also after a training of other weights and inside adapters."""
    model, before, measured = stock(name), weights(stock(name)), Run.lost

    def fails(self: Run) -> Any:
        if self.changed:
            raise KeyboardInterrupt
        return measured(self)

    monkeypatch.setattr(Run, "lost", fails)
    with pytest.raises(KeyboardInterrupt):
        converted(model, "outeffhop", rows(name))
    assert ran
    assert not swaps(model)
    assert same(weights(model), before)


@pytest.mark.parametrize("key", ["halve a row", "distil 1"])
def test_a_toy_step_is_recalled_and_not_run_again(
    key: str, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stock("llama")
    wanted = timeless(converted(whole, "outeffhop+gated", rows("llama")))
    write = Journal.write

    def ends(self: Journal, name: str, *given: Any) -> None:
        write(self, name, *given)
        if name == key:
            raise Killed

    ran.clear()
    with monkeypatch.context() as inside:
        inside.setattr(Journal, "write", ends)
        with pytest.raises(Killed):
            converted(stock("llama"), "outeffhop+gated", rows("llama"), output_dir=tmp_path)
    model = stock("llama")
    assert timeless(converted(model, "outeffhop+gated", rows("llama"), output_dir=tmp_path)) == wanted
    assert len(ran) == 1, "by the first run alone"
    assert same(weights(model), weights(whole))


def test_a_name_stands_once(monkeypatch: pytest.MonkeyPatch) -> None:
    after_the_fit(monkeypatch, lambda run: run.apply("swap", lambda: None))
    with refused("'swap'", "another name"):
        converted(stock("bert"), "outeffhop", rows("bert"), tokens=0)


def lost(perplexity: float) -> Lost:
    return Lost(tokens=1, perplexity=perplexity, stock_perplexity=1.0)


def test_a_trial_keeps_what_loses_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the row of the report has what is lost with the change, or without it."""

    def tries(run: Run) -> None:
        for factor, loss in ((2.0, 1.5), (3.0, 1.1), (5.0, 1.3)):

            def change(factor: float = factor, loss: float = loss) -> None:
                with run.trial(f"times {factor:g}", before[-1]) as trial:
                    scale_a_row(run, factor)
                    trial.keep_if_better(lost(loss))
                before.append(trial.lost)

            run.apply(f"trial of {factor:g}", change)

    before = [lost(1.2)]
    after_the_fit(monkeypatch, tries)
    model, first = stock("bert"), embedding(stock("bert")).detach().clone()
    report = converted(model, "outeffhop", rows("bert"), tokens=0)
    assert torch.equal(embedding(model)[ROW], first[ROW] * 3)
    rows_of_trials = [(step.name, step.lost.perplexity) for step in report.steps[2:]]
    assert rows_of_trials == [("times 2, taken back", 1.2), ("times 3", 1.1), ("times 5, taken back", 1.1)]


def test_a_trial_that_fails_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    first = embedding(stock("bert")).detach().clone()

    def fails(run: Run) -> None:
        with contextlib.suppress(ArithmeticError), run.trial("x", lost(1.0)):
            scale_a_row(run, 2.0)
            raise ArithmeticError
        assert torch.equal(embedding(run.model), first)

    after_the_fit(monkeypatch, fails)
    converted(stock("bert"), "outeffhop", rows("bert"), tokens=0)


def test_the_best_of_some_changes_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def best(run: Run) -> None:
        losses = iter([replaced(run, 0.9), replaced(run, 0.5), replaced(run, 0.7)])
        with monkeypatch.context() as inside:
            inside.setattr(Run, "lost", lambda self: next(losses))
            changes = {f"{factor:g}": lambda factor=factor: scale_a_row(run, factor) for factor in (2.0, 3.0, 5.0)}
            run.best_of("factor", changes, unchanged="none")

    def replaced(run: Run, part: float) -> Lost:
        before = run.record[-1].lost
        assert before.divergence is not None
        return Lost(tokens=1, divergence=part * before.divergence)

    after_the_fit(monkeypatch, best)
    model, first = stock("bert"), embedding(stock("bert")).detach().clone()
    report = converted(model, "outeffhop", rows("bert"), tokens=0)
    assert report.steps[-1].name == "factor: 3"
    assert torch.equal(embedding(model)[ROW], first[ROW] * 6), "each begins where the one before it ended"


def test_no_change_stays_that_loses_more_than_the_model_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the model lost before, as swapped, does not count."""

    def best(run: Run) -> None:
        first, now = (row.lost.divergence for row in (run.record[0], run.record[-1]))
        assert first is not None
        assert now is not None
        assert now < first
        with monkeypatch.context() as inside:
            inside.setattr(Run, "lost", lambda self: Lost(tokens=1, divergence=(first + now) / 2))
            run.best_of("factor", {"2": lambda: scale_a_row(run, 2.0)}, unchanged="none")

    after_the_fit(monkeypatch, best)
    model, first = stock("bert"), embedding(stock("bert")).detach().clone()
    report = converted(model, "outeffhop", rows("bert"), tokens=0)
    assert report.steps[-1].name == "factor: none"
    assert torch.equal(embedding(model), first)
