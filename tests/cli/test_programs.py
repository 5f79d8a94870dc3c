"""`run`, which starts another program with the package imported, and `shim`, which completes older folders."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from hf_attn_swap.run import find
from tests.harness.process import python

from .conftest import Outcome

TOOL = """
import json, sys
print(json.dumps([__name__, sys.argv[1:], "hf_attn_swap" in sys.modules]))
if sys.argv[-1] == "fail":
    raise RuntimeError("the tool's own error")
sys.exit(int(sys.argv[-1]))
"""
WORDS = ["--help", "-m", "a b", "--json=x"]


@pytest.fixture(autouse=True)
def argv(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder with a tool; `sys.argv` and `sys.path` are restored afterwards."""
    (tmp_path / "the_tool.py").write_text(TOOL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.parametrize("code", [0, 7])
def test_module(code: int, command: Callable[..., Outcome], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command("run", "-m", "the_tool", *WORDS, code)
    assert ended.value.code == code
    assert json.loads(capsys.readouterr().out) == ["__main__", [*WORDS, str(code)], True]


def test_a_program_finds_a_class_by_the_name_in_the_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As `transformers serve` does. Elsewhere transformers has no class of this name."""
    (tmp_path / "by_name.py").write_text("import transformers\ntransformers.HfAttnSwapLlamaForCausalLM.config_class\n")
    find(["-m", "by_name"])()
    assert not hasattr(transformers, "HfAttnSwapLlamaForCausalLM")


def test_the_error_of_the_program_is_shown_as_it_is(command: Callable[..., Outcome]) -> None:
    outcome = command("run", "-m", "the_tool", "fail")
    assert outcome.code == 1
    assert outcome.err.startswith("Traceback")
    assert outcome.err.endswith("RuntimeError: the tool's own error\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-program"], "no Python package here installs a program 'no-such-program'"),
        (["-m", "no_such_module"], "there is no module 'no_such_module' here"),
        (["-m", "no.such.module"], "there is no module 'no.such.module' here"),
        (["-m"], "name a program"),
        (["--tasks", "x"], "name a program"),
    ],
)
def test_unknown_program(words: list[str], message: str, command: Callable[..., Outcome]) -> None:
    outcome = command("run", *words)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {message}")
    assert outcome.err.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        find(words)


def test_as_a_module_of_the_package(tmp_path: Path) -> None:
    """As `accelerate launch -m hf_attn_swap.run` starts it."""
    done = python("-m", "hf_attn_swap.run", "-m", "the_tool", *WORDS, 7, cwd=tmp_path, check=False)
    assert done.returncode == 7, done.stderr
    assert json.loads(done.stdout) == ["__main__", [*WORDS, "7"], True]


def test_shim_of_an_older_folder(command: Callable[..., Outcome], tiny_bert: Path, tmp_path: Path) -> None:
    folder = tmp_path / "swapped"
    assert command("patch", tiny_bert, "belief", folder).code == 0
    new = {path.name: path.read_bytes() for path in folder.iterdir()}
    config = json.loads((folder / "config.json").read_text())
    del config["auto_map"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "attn_swap.py").unlink()
    outcome = command("shim", folder)
    assert outcome.code == 0
    assert "AutoModelForSequenceClassification" in outcome.out
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == new


def test_folders_without_a_swap_get_no_shim(command: Callable[..., Outcome], tiny_bert: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    assert command("patch", tiny_bert, "belief", own).code == 0
    config = json.loads((own / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_own.Own"}
    (own / "config.json").write_text(json.dumps(config))
    for folder, message in (
        (tiny_bert, "holds no swapped attention"),
        (tmp_path / "nothing", "holds no model"),
        (own, "runs code of its own"),
    ):
        outcome = command("shim", folder)
        assert (outcome.code, outcome.out) == (2, "")
        assert message in outcome.err
        assert outcome.err.count("\n") == 1
    assert not (tiny_bert / "attn_swap.py").exists()
