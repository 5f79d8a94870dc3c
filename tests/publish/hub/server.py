"""A Hugging Face Hub on 127.0.0.1, for huggingface_hub's own client: `with Hub() as hub: ... hub.env(home)`.

It speaks the part of the protocol that pushing and loading a model needs; `uploads.py` and `downloads.py` have the
endpoints, `store.py` what is kept, `faults.py` what can be made to go wrong. Large files are answered with a redirect
to another host name of the same server, as the real Hub redirects to its storage.
"""

from __future__ import annotations

import os
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from . import downloads, routes, uploads  # noqa: F401  # the first and the last register the endpoints
from .faults import Fault
from .messages import Handler, Request, Response, as_json
from .store import USERS, WRITER, HubError, Repository, Store

TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


class Entry(NamedTuple):
    """One request, as the hub saw it."""

    method: str
    path: str
    status: str
    size: int


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news; any other error is."""
        import sys

        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Hub:
    """The server.

    Args:
        part_size: large files above it are uploaded in parts of this many bytes; None for one piece.
        xet: folder of the client's local xet store; None for plain large files.
    """

    def __init__(self, *, part_size: int | None = None, xet: Path | None = None) -> None:
        self.part_size, self.xet = part_size, xet
        self.store = Store()
        self.faults: list[Fault] = []
        self.log: list[Entry] = []
        self.lock = threading.RLock()
        self.server = Server(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": self}))
        self.port = self.server.server_address[1]
        self.url, self.storage_url = f"http://127.0.0.1:{self.port}", f"http://localhost:{self.port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def env(self, home: Path, token: str | None = WRITER) -> dict[str, str]:
        """Environment of a client with this cache (HF_HOME) and token."""
        settings = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }
        if token is not None:
            settings["HF_TOKEN"] = token
        if self.xet is None:
            settings["HF_HUB_DISABLE_XET"] = "1"
        return {key: value for key, value in os.environ.items() if key not in TOKEN_VARIABLES} | settings

    def fail(self, method: str, path: str, kind: str = "status", **settings: Any) -> Fault:
        """Make matching requests fail; see `Fault`."""
        with self.lock:
            self.faults.append(Fault(method, path, kind, **settings))
            return self.faults[-1]

    def heal(self) -> None:
        """Take back all faults."""
        with self.lock:
            self.faults.clear()

    def repository(self, name: str) -> Repository:
        return self.store.repositories[name]

    def requests(self, method: str, path: str) -> list[Entry]:
        """What was asked of a path, or of a part of one."""
        return [entry for entry in self.log if entry.method == method and path in entry.path]

    def fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            struck = [fault for fault in self.faults if fault.strikes(method, path)]
        return struck[0] if struck else None

    def note(self, method: str, path: str, status: str, size: int) -> None:
        with self.lock:
            self.log.append(Entry(method, path, status, size))

    def answer(self, request: Request) -> Response:
        """Do what is asked, all or nothing, one request after another."""
        with self.lock:
            try:
                return routes.answer(self, request)
            except HubError as problem:
                return as_json({"error": str(problem)}, problem.status, problem.headers)

    def user(self, request: Request) -> tuple[str | None, str]:
        """Who asks and in which role; nobody without a token."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not given:
            return None, ""
        if given not in USERS:
            raise HubError(401, "Invalid credentials in Authorization header")
        return USERS[given]
