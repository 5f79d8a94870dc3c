"""`--version` and every `--help` answer without the libraries that take seconds to load."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from typer.main import get_command

import hf_attn_swap
from hf_attn_swap_cli import app

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "huggingface_hub", "datasets", "numpy", "hf_attn_swap"}
SCRIPT = """
import contextlib, importlib, io, json, sys
module, function, calls = sys.argv[1:]
answers = []
for words in json.loads(calls):
    sys.argv, printed = ["hf-attn-swap", *words], io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        getattr(importlib.import_module(module), function)()
    answers.append([printed.getvalue(), sorted({name.partition(".")[0] for name in sys.modules})])
print(json.dumps(answers))
"""


def test_no_library_is_loaded() -> None:
    """One process asks for all of them, one after the other."""
    calls = [["--version"], ["--help"], *([name, "--help"] for name in get_command(app).commands)]  # type: ignore[attr-defined]  # a group
    script = re.search(r'^hf-attn-swap = "(\S+):(\S+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert script is not None
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *script.groups(), json.dumps(calls)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    answers = json.loads(done.stdout)
    assert answers[0][0] == f"hf-attn-swap {hf_attn_swap.__version__}\n"
    for words, (printed, loaded) in zip(calls, answers, strict=True):
        assert words == ["--version"] or "Usage:" in printed, words
        assert not HEAVY & set(loaded), words
