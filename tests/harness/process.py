"""Another process that runs Python: a fork of one that has loaded torch and transformers, and not the package.

A new interpreter takes three seconds for these imports, and a fork takes none. A real one is started by programs
that read the environment while they import huggingface_hub (another endpoint), and by tests of what is loaded when.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOADED = ["torch", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"]


def python(
    *words: object,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    check: bool = True,
    timeout: float | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS`: a file, `-m` and a module, or `-c` and code; then arguments. It has to succeed if `check`.

    A process that takes more than `timeout` seconds is killed, and its exit code is -9.
    """
    command = [str(word) for word in words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
    done = (_started if sys.platform == "win32" else _forked)(command, environment, cwd, timeout)
    assert not check or done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done


def together(count: int, *words: object, timeout: float, **more: Any) -> list[subprocess.CompletedProcess[str]]:
    """Run the same in several processes at once, with the variables that accelerate and torchrun give to each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    own = {"WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    given = more.pop("env", {})

    def started(rank: int) -> subprocess.CompletedProcess[str]:
        env = {**given, **own, "RANK": str(rank), "LOCAL_RANK": str(rank), "CUDA_VISIBLE_DEVICES": ""}
        return python(*words, env=env, timeout=timeout, **more)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(started, range(count)))


def _started(
    words: list[str], environment: dict[str, str], cwd: Path, timeout: float | None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    try:
        return subprocess.run(
            command, env=environment, cwd=cwd, capture_output=True, text=True, check=False, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, -9, "", "")


def _forked(
    words: list[str], environment: dict[str, str], cwd: Path, timeout: float | None
) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        child = _server().Process(target=_child, args=(words, environment, str(cwd), folder))
        child.start()
        child.join(timeout)
        if child.is_alive():
            child.kill()
            child.join()
        out, err = (Path(folder, name).read_text("utf-8") for name in ("out", "err"))
        return subprocess.CompletedProcess(words, child.exitcode or 0, out, err)


@functools.cache
def _server() -> multiprocessing.context.ForkServerContext:
    """The process that is forked: it starts once, without the Hub and with a home of its own."""
    home = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    before = dict(os.environ)
    os.environ.update(HF_HOME=home, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _child(words: list[str], environment: dict[str, str], cwd: str, folder: str) -> None:
    """What the fork does: it becomes `python WORDS`."""
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT), number)
    assert not {"hf_attn_swap", "peft"} & set(sys.modules)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    sys.path[:0] = [cwd, *filter(None, environment["PYTHONPATH"].split(os.pathsep))]
    first, *rest = words
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
