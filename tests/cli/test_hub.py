"""`--token` and `--revision` reach every request, on a private repository of a Hub on this machine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from hf_attn_swap import list_variants
from tests.harness.hub import READER, WRITER, Hub

from .conftest import Outcome

ROOT = Path(__file__).parents[2]
REPO = "me/closed"
SCRIPT = """
import contextlib, io, json, sys
from hf_attn_swap_cli import run
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""


def swapped(folder: Path) -> list[str]:
    return [swap["variant"] for swap in json.loads((folder / "config.json").read_text())["attn_swap"]["swaps"]]


@pytest.mark.slow
def test_a_private_repository_and_its_branch(
    command: Callable[..., Any], tiny_bert: Path, labelled_texts: Path, tmp_path: Path
) -> None:
    variants = [name for name in list_variants() if name in ("belief", "outeffhop")]
    for name in variants:
        assert command("patch", tiny_bert, name, tmp_path / name).code == 0
    data = ["--data", str(labelled_texts), "--column", "sentence", "--device", "cpu"]
    reader, branch = ["--token", READER], ["--revision", "branch"]
    commands = {
        "push": ["push", str(tmp_path / variants[0]), REPO, "--private", "--token", WRITER],
        "push branch": ["push", str(tmp_path / variants[1]), REPO, *branch, "--token", WRITER],
        "no token": ["describe", REPO],
        "describe": ["describe", REPO, *reader],
        "describe branch": ["describe", REPO, *reader, *branch],
        "patch": ["patch", REPO, "gated", str(tmp_path / "gated"), "--layers", "0", *reader, *branch],
        "report": ["report", REPO, *data, "--out", str(tmp_path / "report"), *reader, *branch],
        "compare": ["compare", REPO, str(tiny_bert), *data, "--json", *reader],
        "refused": ["convert", REPO, "belief", str(tmp_path / "no"), *data, "--split", "train", *reader, *branch],
    }
    with Hub() as hub:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            input=json.dumps(list(commands.values())),
            env=hub.env(tmp_path / "home", None) | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "0"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
        assert hub.repositories[REPO].private
    outcomes = [Outcome(*json.loads(line)) for line in done.stdout.splitlines()]
    outcome_of = dict(zip(commands, outcomes, strict=True))
    failed = {name: outcome.err for name, outcome in outcome_of.items() if outcome.code}
    assert set(failed) == {"no token", "refused"}, failed
    assert "is converted already" in failed["refused"]  # so the model was read
    assert variants[0] in outcome_of["describe"].out
    assert variants[1] in outcome_of["describe branch"].out
    assert swapped(tmp_path / "gated") == ["gated", variants[1]]
    assert (tmp_path / "gated/tokenizer.json").exists()
    assert (tmp_path / "report/report.json").exists()
    assert json.loads(outcome_of["compare"].out)["agreement"] <= 1


def test_push_without_a_network(
    command: Callable[..., Any], tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be published is shown all the same."""
    assert command("patch", tiny_bert, "gated", tmp_path / "gated").code == 0
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # the port of "discard", where nothing listens
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    shown = command("push", tmp_path / "gated", REPO, "--dry-run")
    assert shown.code == 0, shown.err
    sizes = dict(re.findall(r"^(\S+) +([\d,]+)$", shown.out, re.MULTILINE))
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json", "attn_swap.py"} <= set(sizes)
    assert sizes["model.safetensors"] == f"{(tmp_path / 'gated/model.safetensors').stat().st_size:,}"
    assert "- attn-swap:gated" in shown.out
    refused = command("push", tmp_path / "gated", REPO)
    assert refused.code == 2
    assert "error: the Hub cannot be reached" in refused.err
