"""Progress is shown where somebody sees it: bars on a terminal, lines in a log, and nothing with --quiet."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers.utils import logging

from hf_attn_swap.text import bar as bars
from hf_attn_swap.text.bar import bar, hidden, visible
from tests.training.conftest import options, tiny  # noqa: F401  # the tiny model and sentences of the recipes

from .conftest import NEUTRAL, Outcome

Command = Callable[..., Outcome]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(f"{NEUTRAL[i % 6]} {NEUTRAL[i // 6 % 6]} {NEUTRAL[5 * i % 6]}" for i in range(120)))
    return path


def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stderr say that it is a terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.delenv("TQDM_DISABLE", raising=False)
    logging.enable_progress_bar()


def drawn(text: str) -> bool:
    return "\r" in text or "%|" in text or "it/s" in text


def commands(model: Path, texts: Path, out: Path) -> dict[str, list[object]]:
    return {
        "convert": ["convert", model, "simpletron_resl", out, "--data", texts, "--tokens", 600, "--device", "cpu"],
        "compare": ["compare", model, model, "--data", texts, "--rows", 16],
        "evaluate": ["evaluate", model, "--data", texts.with_name("labelled.csv"), "--label", "label"],
        "report": ["report", model, "--data", texts, "--variant", "belief", "--rows", 8, "--out", out],
    }


@pytest.mark.parametrize("name", ["convert", "compare", "evaluate", pytest.param("report", marks=pytest.mark.slow)])
def test_where_stderr_is_no_terminal(name: str, command: Command, tiny_bert: Path, texts: Path, tmp_path: Path) -> None:
    """A log gets a line for each step of a conversion, and no bar; with -q it gets nothing."""
    (tmp_path / "labelled.csv").write_text("text,label\nthe film was fine,1\nthe plot was dull,0\n")
    told = command(*commands(tiny_bert, texts, tmp_path / "out")[name])
    assert told.code == 0, told.err
    assert not drawn(told.err)
    assert ("swap: 2 layers" in told.err) == (name == "convert")
    assert ("loading" in told.err) == (name != "report")
    quiet = command(*commands(tiny_bert, texts, tmp_path / "quiet")[name], "-q")
    assert quiet.code == 0
    assert quiet.err == ""
    assert quiet.out


def test_on_a_terminal(
    command: Command, tiny_bert: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal(monkeypatch)
    words = commands(tiny_bert, texts, tmp_path / "out")["compare"]
    assert drawn(command(*words).err)
    assert command(*words, "--quiet").err == ""
    assert drawn(command(*words).err), "the next command shows its bars again"


def test_a_recipe(command: Command, tiny: Path, tmp_path: Path) -> None:  # noqa: F811  # the fixture
    """Trainer prints what it logs, and --quiet is no word of the recipe."""
    words = ["train", "text-classification", *options(tiny, tmp_path, "--save_strategy", "no", "--logging_steps", "1")]
    told = command(*words, "--output_dir", tmp_path / "loud")
    assert "'loss'" in told.out
    assert not drawn(told.err)
    quiet = command(*words, "--output_dir", tmp_path / "quiet", "--quiet")
    assert quiet.err == ""
    assert quiet.out.splitlines() == [line for line in told.out.splitlines() if "accuracy" in line and "(seeds" in line]


@pytest.mark.parametrize(
    ("terminal_there", "variables", "modules", "wanted"),
    [
        (True, {}, (), True),
        (False, {}, (), False),
        (False, {}, ("ipykernel.zmqshell",), True),
        (True, {"TQDM_DISABLE": "1"}, (), False),
        (True, {"TQDM_DISABLE": ""}, (), True),
        (True, {"RANK": "1"}, (), False),
        (True, {"RANK": "0"}, (), True),
    ],
)
def test_who_sees_a_bar(
    terminal_there: bool,
    variables: dict[str, str],
    modules: tuple[str, ...],
    wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal_there)
    for name in ("TQDM_DISABLE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "ipykernel.zmqshell", raising=False)
    for name, value in variables.items():
        monkeypatch.setitem(os.environ, name, value)
    for name in modules:
        monkeypatch.setitem(sys.modules, name, bars)
    assert visible() is wanted
    assert bar([1]).disable is not wanted
    assert bar([1], shown=False).disable
    with hidden():
        assert not visible()
    assert visible() is wanted
