"""Distillation of adapters on a model split over processes by FSDP2 equals that on the whole model."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_split_over_processes(size: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "tests.conversion.distil_fsdp_child"]
    started = [
        subprocess.Popen([*command, str(rank), str(size), port], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(size)
    ]
    for process in started:
        _, words = process.communicate(timeout=300)
        assert process.returncode == 0, words[-3000:]
