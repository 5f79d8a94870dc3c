"""`--version` and every `--help` answer without the libraries that take seconds to load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

import hf_attn_swap
from hf_attn_swap_cli import app

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "huggingface_hub", "datasets", "numpy", "hf_attn_swap"}
SCRIPT = """
import contextlib, importlib, io, json, sys
module, function = sys.argv.pop(1), sys.argv.pop(1)
printed = io.StringIO()
with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
    getattr(importlib.import_module(module), function)()
print(json.dumps([printed.getvalue(), sorted({name.partition(".")[0] for name in sys.modules})]))
"""


def program(*words: str) -> tuple[str, set[str]]:
    """What the console script prints, and the packages that it has loaded."""
    script = re.search(r'^hf-attn-swap = "(\S+):(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert script is not None
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *script.groups(), *words], cwd=ROOT, capture_output=True, text=True, check=True
    )
    printed, loaded = json.loads(done.stdout)
    return printed, set(loaded)


def test_the_version_loads_no_library() -> None:
    printed, loaded = program("--version")
    assert printed == f"hf-attn-swap {hf_attn_swap.__version__}\n"
    assert not loaded & HEAVY


@pytest.mark.parametrize("name", ["", *get_command(app).commands])  # type: ignore[attr-defined]  # a group
def test_help_loads_no_library(name: str) -> None:
    printed, loaded = program(*name.split(), "--help")
    assert "Usage:" in printed
    assert not loaded & HEAVY
