"""The demo of docs/guides/generate.md: its lines, run as they stand there, answer what the model generates."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import pipeline

from tests.harness.process import ROOT

pytest.importorskip("gradio", reason="gradio is not installed (`pip install gradio`)")
client = pytest.importorskip("gradio_client", reason="gradio is not installed (`pip install gradio`)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other packages
PAGE = ROOT / "docs" / "guides" / "generate.md"
MODEL = "smollm2-outeffhop"  # as on the page
TEXTS = ("The film was", "A second text")


def lines() -> str:
    """The program on the page that imports Gradio."""
    (found,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "gradio" in block)
    return str(found)


def connected(port: int, server: subprocess.Popen[bytes], log: Path) -> Any:
    """A client, as soon as the server answers."""
    for _ in range(240):
        assert server.poll() is None, log.read_text()[-2000:]
        with socket.socket() as asked:
            if asked.connect_ex(("127.0.0.1", port)) == 0:
                return client.Client(f"http://127.0.0.1:{port}", verbose=False)
        time.sleep(0.5)
    pytest.fail(log.read_text()[-2000:])


def test_the_lines_of_the_page(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint("llama", "outeffhop").rename(tmp_path / MODEL)
    generate = pipeline("text-generation", model=str(folder))
    (tmp_path / "app.py").write_text(lines())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": str(port), "GRADIO_ANALYTICS_ENABLED": "False"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = tmp_path / "server.log"
    with log.open("w") as printed:
        server = subprocess.Popen(
            [sys.executable, "app.py"], stdout=printed, stderr=subprocess.STDOUT, env=environment, cwd=tmp_path
        )
        try:
            demo = connected(port, server, log)
            for text in TEXTS:
                wanted = generate(text, max_new_tokens=20, do_sample=False)[0]["generated_text"]
                assert demo.predict(text, api_name="/answer") == wanted
        finally:
            server.terminate()
            server.wait(30)
