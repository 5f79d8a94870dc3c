"""A step is one function and its place in the list: run, measured, written into the journal, and undone on an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_attn_swap import unpatch_model
from hf_attn_swap.conversion import convert as module
from hf_attn_swap.conversion import stages, steps
from hf_attn_swap.conversion.engine import name_of
from hf_attn_swap.conversion.journal import Journal
from hf_attn_swap.conversion.stages import stage_kind
from hf_attn_swap.conversion.run import Run
from hf_attn_swap.training.arguments import ConversionArguments
from tests.contract.harness import refused, swaps

from .converting import CALM, Killed, converted, rows, same, stock, timeless, weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
ROW = 3  # of the embedding that the toy step changes


def embedding(model: Any) -> torch.nn.Parameter:
    found = model.get_input_embeddings().weight
    assert isinstance(found, torch.nn.Parameter)
    return found


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A toy step after the fit, which changes a weight and leaves a note; the list has an entry for each run of it."""
    calls: list[str] = []

    def halve_a_row(state: Run) -> None:
        """Change one row of the embedding."""
        calls.append("halve a row")
        weight = embedding(state.model)
        state.keep([weight])
        state.notes["row"] = ROW
        with torch.no_grad():
            weight[ROW] *= 0.5

    place = module.STEPS.index(steps.fit) + 1
    monkeypatch.setattr(module, "STEPS", [*module.STEPS[:place], halve_a_row, *module.STEPS[place:]])
    return calls


def test_the_list_reads_like_the_docstring() -> None:
    names = [name_of(step) for step in steps.STEPS]
    first = ["stock", "swap", "absorb", "heads", "fit", "choose"]
    assert names == [*first, "distil", "finish", "smooth", "qat", "integers"]
    told = [
        line.split()[1].rstrip(":")
        for line in str(module.__doc__).splitlines()
        if line.strip()[:2].rstrip(".").isdigit()
    ]
    assert told == names
    files = {path.stem for path in Path(str(steps.__file__)).parent.glob("*.py")} - {"__init__"}
    assert files == set(names)


def test_a_toy_step_is_run_and_reported(ran: list[str]) -> None:
    model, before = stock("bert"), embedding(stock("bert")).detach().clone()
    report = converted(model, "outeffhop", rows("bert"), tokens=1)
    assert [step.name for step in report.steps][2:] == ["halve a row"]
    assert report.steps[2].lost.cost > report.steps[1].lost.cost
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


@pytest.mark.parametrize("key", ["halve a row: work", "halve a row", "distil 1: work"])
def test_a_toy_step_is_recalled_and_not_run_again(
    key: str, ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stock("llama")
    wanted = timeless(converted(whole, "outeffhop+gated", rows("llama")))
    write = Journal.write

    def ends(self: Journal, name: str, value: dict[str, Any]) -> None:
        write(self, name, value)
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


def test_a_journal_of_another_list_of_steps_is_refused(ran: list[str], tmp_path: Path, monkeypatch: Any) -> None:
    converted(stock("bert"), "outeffhop", rows("bert"), tokens=1, output_dir=tmp_path)
    monkeypatch.setattr(module, "STEPS", steps.STEPS)
    with refused("holds another conversion (steps differ)"):
        converted(stock("bert"), "outeffhop", rows("bert"), tokens=1, output_dir=tmp_path)


def test_a_toy_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users name it in `convert` and in a recipe's list, and its step finds it."""
    from dataclasses import dataclass
    from typing import ClassVar

    monkeypatch.setattr(stages, "KINDS", dict(stages.KINDS))

    @stage_kind
    @dataclass(frozen=True, kw_only=True)
    class Shrink:
        name: ClassVar[str] = "shrink"
        recorded: ClassVar[str] = "shrink"
        factor: float = 0.5

    found: list[float] = []

    def shrink(state: Run) -> None:
        found.extend(stage.factor for stage in state.config.plan.others if isinstance(stage, Shrink))

    monkeypatch.setattr(module, "STEPS", [module.STEPS[0], shrink, *module.STEPS[1:]])
    monkeypatch.setattr("hf_attn_swap.conversion.plan.KINDS", stages.KINDS)
    converted(stock("bert"), "outeffhop", rows("bert"), tokens=1, stages=[Shrink(factor=0.25), CALM])
    assert found == [0.25]
    assert ConversionArguments(stages=['{"stage": "shrink", "factor": 2}', "fine_tune"]).plan[0] == Shrink(factor=2)
    with refused("there is a stage 'shrink' already"):
        stage_kind(Shrink)
    with refused("no step takes the stage 'shrink' in a recipe."):
        steps.steps_of([Shrink()])


def test_between_its_parts_a_step_changes_nothing_that_is_left() -> None:
    """After a whole conversion and `unpatch_model`, a model whose training was taken back is the stock model."""
    model, before = stock("bert"), weights(stock("bert"))
    report = converted(model, "simpletron_resl", rows("bert"), max_loss=1e-12)
    assert report.steps[-1].name == "last group taken back"
    assert same(weights(unpatch_model(model) if swaps(model) else model), before)
