"""Tests with real engines: `make test-engines` runs them, and nothing else collects them.

The variable `HF_ATTN_SWAP_ENGINES` names the folder in which that target has put vLLM and llama.cpp.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if os.environ.get("HF_ATTN_SWAP_ENGINES") else ["test_*.py"]

Results = list[dict[str, Any]]


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Results]:
    """Runs jobs in vLLM, in one other process, and gives their results (`serve_child.py`) and what vLLM logged."""

    def run(jobs: list[dict[str, Any]], *words: str, **env: str) -> Results:
        folder = tmp_path_factory.mktemp("jobs")
        (folder / "jobs.json").write_text(json.dumps(jobs))
        command = [sys.executable, str(Path(__file__).with_name("serve_child.py")), "jobs.json", "results.json", *words]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, check=False
        )
        assert (folder / "results.json").exists(), done.stdout[-1000:] + done.stderr[-3000:]
        results: Results = json.loads((folder / "results.json").read_text())
        assert len(results) == len(jobs), done.stdout[-1000:] + done.stderr[-3000:]
        return [{**result, "log": done.stdout + done.stderr} for result in results]

    return run
