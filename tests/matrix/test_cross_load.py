"""The version matrix's script, within one version; `make test-matrix` runs it between the oldest and the newest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("cross_load.py")


def script(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.slow
def test_round_trip(tmp_path: Path) -> None:
    saved = script("save", tmp_path)
    assert saved.returncode == 0, saved.stderr[-2000:]
    loaded = script("load", tmp_path)
    assert loaded.returncode == 0, loaded.stderr[-2000:]
    count = loaded.stdout.split()[0]
    assert f"{count} bit for bit" in loaded.stdout
    config = next(tmp_path.glob("*/modern_hopfield/config.json"))
    changed = json.loads(config.read_text())
    changed["attn_swap"]["swaps"][0]["options"]["modern_hopfield"]["alpha"] = 0.4
    config.write_text(json.dumps(changed))
    assert script("load", tmp_path).returncode != 0
