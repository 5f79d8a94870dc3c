"""A conversion that is killed anywhere and called again ends with the same weights and the same report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_attn_swap.conversion import distill
from hf_attn_swap.conversion.distill import StopWithin
from hf_attn_swap.conversion.journal import Journal

from .converting import ADAPTERS, Killed, converted, rows, same, stock, timeless, weights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # PEFT
Result = tuple[dict[str, Any], dict[str, torch.Tensor], dict[str, Any]]


def run(name: str, variant: str, folder: Path | None, **more: Any) -> Result:
    """The report without seconds, the weights, and the block of the config."""
    model = stock(name)
    report = converted(model, variant, rows(name), output_dir=folder, **more)
    return timeless(report), weights(model), getattr(model.config, "attn_swap", {})


def assert_equal(got: Result, wanted: Result) -> None:
    assert got[0] == wanted[0]
    assert same(got[1], wanted[1])
    assert got[2] == wanted[2]


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Counts the writes of the journal; before or after the write of the number or key `last`, the process ends."""
    state: dict[str, Any] = {"seen": [], "last": 0, "after": False}
    real = Journal.write

    def write(self: Journal, *given: Any) -> None:
        state["seen"].append(given[0])
        ends = state["last"] in (len(state["seen"]), given[0])
        if not ends or state["after"]:
            real(self, *given)
        if ends:
            raise Killed

    monkeypatch.setattr(Journal, "write", write)
    return state


def killed_at(state: dict[str, Any], place: int | str, after: bool, *given: Any, **more: Any) -> None:
    state.update(seen=[], last=place, after=after)
    with pytest.raises(Killed):
        run(*given, **more)
    state.update(seen=[], last=0)


CASES = [  # the last one is how the conversion ends
    ("bert", "simpletron", {"max_loss": 1e-12, "layers": [0, 2]}, "distil 1"),  # all weights train; named layers
    ("bert", "modern_hopfield", {"keep": 0.4}, "distillation taken back"),  # calibration with an order of heads
    ("bert", "belief", {"max_loss": 1e-12, "tokens": 150}, "last group taken back"),  # several groups
    ("llama", "outeffhop+gated", {}, "adapters merged"),  # and parameters of the variant beside the adapters
    ("llama", "simpletron_resl", {"fit": "map"}, "adapters merged"),  # a fit that the user named
    ("bert", "simpletron_resl", {"stages": [replace(ADAPTERS, learning_rate=1.0)]}, "distillation taken back"),
]


def test_killed_after_a_fit_that_the_user_named(writes: dict[str, Any], tmp_path: Path) -> None:
    more = {"tokens": 100, "fit": "map"}
    wanted = run("llama", "simpletron_resl", None, **more)
    killed_at(writes, "fit: map", True, "llama", "simpletron_resl", tmp_path, **more)
    assert_equal(run("llama", "simpletron_resl", tmp_path, **more), wanted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant", "more", "ends"),
    CASES,
    ids=[f"{number}-{case[0]}-{case[1]}" for number, case in enumerate(CASES)],
)
def test_killed_at_every_write(
    name: str, variant: str, more: dict[str, Any], ends: str, writes: dict[str, Any], tmp_path: Path
) -> None:
    wanted = run(name, variant, tmp_path / "whole", **more)
    seen = list(writes["seen"])
    assert wanted[0]["steps"][-1]["name"] == ends
    assert_equal(run(name, variant, None, **more), wanted)
    assert any(key.startswith("distil") for key in seen)
    for place in range(1, len(seen) + 1):
        for after in (False, True):
            folder = tmp_path / f"{place}-{after}"
            killed_at(writes, place, after, name, variant, folder, **more)
            assert_equal(run(name, variant, folder, **more), wanted)
    writes["seen"].clear()
    assert_equal(run(name, variant, tmp_path / "whole", **more), wanted)
    assert not writes["seen"], "a finished conversion is read, and nothing is computed again"


@pytest.mark.parametrize(
    ("name", "variant"), [pytest.param("bert", "simpletron_resl", marks=pytest.mark.slow), ("llama", "outeffhop+gated")]
)
def test_killed_in_the_middle_of_a_training(
    name: str, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a checkpoint, which also holds the variant's own parameters beside adapters."""
    monkeypatch.setattr(distill, "SAVE_EVERY", 2)
    real = StopWithin.on_step_end

    def ends(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        real(self, args, state, control, **kwargs)
        if state.global_step == 3:
            raise Killed

    wanted = run(name, variant, None, tokens=300)
    with monkeypatch.context() as inside:
        inside.setattr(StopWithin, "on_step_end", ends)
        with pytest.raises(Killed):
            run(name, variant, tmp_path, tokens=300)
    assert [path.name for path in (tmp_path / "distil-1").glob("checkpoint-*")] == ["checkpoint-2"]
    steps: list[int] = []
    monkeypatch.setattr(
        StopWithin, "on_step_end", lambda self, args, state, control, **kw: steps.append(state.global_step)
    )
    assert_equal(run(name, variant, tmp_path, tokens=300), wanted)
    assert steps[0] == 3


@pytest.mark.slow
def test_stopped_at_a_step_that_would_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step at which the budget is met leaves no checkpoint, from which the training would go on."""
    monkeypatch.setattr(distill, "SAVE_EVERY", 1)
    given: dict[str, Any] = {"tokens": 1200, "layers": [0, 1, 2]}
    losses = [step["lost"]["divergence"] for step in run("bert", "simpletron_resl", None, **given)[0]["steps"]]
    assert losses[2] < losses[1]
    given["max_loss"] = (losses[1] + losses[2]) / 2
    wanted = run("bert", "simpletron_resl", None, **given)
    assert wanted[0]["met"]
    assert 0 < wanted[0]["steps"][-1]["tokens"] < 1200

    def ends(self: Journal, *given: Any) -> None:
        raise Killed

    with monkeypatch.context() as inside:
        inside.setattr(Journal, "write", ends)
        with pytest.raises(Killed):
            run("bert", "simpletron_resl", tmp_path, **given)
    assert_equal(run("bert", "simpletron_resl", tmp_path, **given), wanted)


def child(folder: Path, result: Path, batch: int, last: int = 0, launch: tuple[str, ...] = ()) -> int:
    words = [str(folder), str(result), str(batch), str(last)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launch, "-m", "tests.conversion.convert_child", *words]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2]
    )
    assert ended.returncode in (0, 9), ended.stderr[-3000:]
    return ended.returncode


@pytest.mark.slow
def test_a_process_that_ends_without_warning(tmp_path: Path) -> None:
    """In the fit, in the writing of trained weights, and after them."""
    assert child(tmp_path / "whole", tmp_path / "whole.safetensors", 8) == 0
    for last in (2, 3, 4):
        assert child(tmp_path / "killed", tmp_path / "killed.safetensors", 8, last - 1) == 9
    assert child(tmp_path / "killed", tmp_path / "killed.safetensors", 8) == 0
    assert same(load_file(tmp_path / "killed.safetensors"), load_file(tmp_path / "whole.safetensors"))
    one, other = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("whole", "killed"))
    assert one == other


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path: Path) -> None:
    """The same global batch on one process, and on two by gloo: the same weights to rounding, and one journal."""
    launch = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=29781")
    assert child(tmp_path / "one", tmp_path / "one.safetensors", 8) == 0
    assert child(tmp_path / "two", tmp_path / "two.safetensors", 4, launch=launch) == 0
    one, two = load_file(tmp_path / "one.safetensors"), load_file(tmp_path / "two.safetensors")
    before = stock("bert").state_dict()
    assert any(not torch.allclose(one[name], value, atol=1e-3) for name, value in before.items()), "it has trained"
    for name, value in one.items():
        assert torch.allclose(two[name], value, atol=2e-5, rtol=1e-4), (name, (two[name] - value).abs().max())
    steps = [json.loads((tmp_path / f"{name}.json").read_text())["steps"] for name in ("one", "two")]
    assert [(step["name"], step["tokens"]) for step in steps[0]] == [
        (step["name"], step["tokens"]) for step in steps[1]
    ]
