"""`transformers serve`, started with the package imported, answers with a converted model's own tokens."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.harness.process import ROOT

pytest.importorskip("fastapi", reason="the server of transformers is not installed (the extra `tools`)")
pytest.importorskip("uvicorn", reason="the server of transformers is not installed (the extra `tools`)")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of other packages
QUESTIONS = ("The film", "A second question, which is longer")
NEW = 8
CUT = "\N{REPLACEMENT CHARACTER}"  # a stream waits for the other bytes of a letter that the last token began


@contextmanager
def served(folder: Path, *words: str, imported: bool = True) -> Iterator[tuple[str, Path]]:
    """The address of a running server, and the file with what it prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    start = ["hf_attn_swap.run", "transformers"] if imported else ["transformers.cli.transformers"]
    program = [sys.executable, "-m", *start, "serve", str(folder)]
    program += ["--host", "127.0.0.1", "--port", port, "--device", "cpu", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    log = folder.parent / "server.log"
    with log.open("w") as lines:
        server = subprocess.Popen(program, stdout=lines, stderr=subprocess.STDOUT, env=environment, cwd=folder.parent)
        try:
            wait(f"http://127.0.0.1:{port}/health", server, log)
            yield f"http://127.0.0.1:{port}/v1/chat/completions", log
        finally:
            server.terminate()
            server.wait(30)


def wait(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Until the server answers."""
    for _ in range(240):
        assert server.poll() is None, log.read_text()[-2000:]
        try:
            urllib.request.urlopen(address, timeout=5)
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
        else:
            return
    pytest.fail(log.read_text()[-2000:])


def ask(address: str, folder: Path, question: str, stream: bool = False) -> str:
    """The body of the server's answer."""
    chat = [{"role": "user", "content": question}]
    body: dict[str, Any] = {"model": str(folder), "messages": chat, "max_tokens": NEW, "stream": stream}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(address, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return str(answer.read().decode())


def generated(folder: Path, question: str) -> str:
    """What the model itself generates."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": question}]
    batch = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = model.generate(**batch, do_sample=False, max_new_tokens=NEW)
    return str(tokenizer.decode(ids[0, batch["input_ids"].shape[1] :], skip_special_tokens=True))


@pytest.mark.parametrize("variant", ["belief", "simpletron_resl"])
def test_chat(variant: str, checkpoint: Callable[..., Path]) -> None:
    """One question, the same as a stream, and two at once."""
    folder = checkpoint("llama", variant)
    wanted = {question: generated(folder, question) for question in QUESTIONS}
    with served(folder) as (address, _):
        answer = json.loads(ask(address, folder, QUESTIONS[0]))
        assert answer["choices"][0]["message"]["content"] == wanted[QUESTIONS[0]]
        lines = ask(address, folder, QUESTIONS[1], stream=True).splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        assert len(chunks) > 1
        streamed = "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks)
        assert streamed.rstrip(CUT) == wanted[QUESTIONS[1]].rstrip(CUT)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda question: json.loads(ask(address, folder, question)), QUESTIONS))
    assert [each["choices"][0]["message"]["content"] for each in answers] == list(wanted.values())


def test_continuous_batching_is_refused(checkpoint: Callable[..., Path]) -> None:
    """By transformers, which knows no paged form of the package's attention function."""
    folder = checkpoint("llama", "belief")
    batching = served(folder, "--continuous-batching", "--log-level", "debug")
    with batching as (address, log), pytest.raises(urllib.error.HTTPError, match="500"):
        ask(address, folder, QUESTIONS[0])
    assert "Implementation hf_attn_swap is not supported for continuous batching" in log.read_text()


def test_refused_without_the_package(checkpoint: Callable[..., Path]) -> None:
    """The server passes `attn_implementation=None`, which would run stock attention; it finds no class."""
    folder = checkpoint("llama", "outeffhop")
    stopped = pytest.raises(AssertionError, match="no attribute HfAttnSwapLlamaForCausalLM")
    with stopped, served(folder, imported=False):
        pytest.fail("the server answers")
