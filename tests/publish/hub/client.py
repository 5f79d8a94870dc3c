"""The parent's side of `child.py`: call its functions in another process, which has the Hub and an empty cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class RemoteError(Exception):
    """What a call in the child raised; `kinds` are the names of its classes, its own first."""

    def __init__(self, kinds: list[str], message: str) -> None:
        super().__init__(f"{kinds[0]}: {message}")
        self.kinds = kinds


class Client:
    """A child process, started at once and ready when it answers its first call."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.publish.hub.child"],
                cwd=ROOT,
                env={**environment, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def call(self, function: str, **arguments: Any) -> Any:
        """The value of the child's function.

        Raises:
            RemoteError: what it raised.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([function, arguments]) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the client died:\n{self.log.read_text()[-3000:]}"
        reply = json.loads(line)
        if "kinds" in reply:
            raise RemoteError(reply["kinds"], reply["message"])
        return reply["value"]

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()
