"""Requests and answers as plain values, and the handler that reads and writes them."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from .server import Hub


@dataclass(frozen=True)
class Request:
    """What is asked; the names of headers are lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body or b"{}")


@dataclass(frozen=True)
class Response:
    """An answer; `cut` closes the connection after so many bytes of the body."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None


def as_json(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(status, json.dumps(data).encode(), {"Content-Type": "application/json", **(headers or {})})


class Handler(BaseHTTPRequestHandler):
    """One connection of the client; `hub` is set on the subclass that a server makes for itself."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        """Nothing to stderr: the hub keeps a log of its own."""

    def answer(self) -> None:
        path = urlsplit(self.path).path
        fault = self.hub.fault(self.command, path)
        if fault is not None and fault.kind == "drop":
            self.read_body(half=True)
            self.hub.note(self.command, path, "dropped", 0)
            self.hang_up()
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, path, headers, self.read_body())
        if fault is not None and fault.kind == "status":
            response = as_json({"error": f"fault {fault.status}"}, fault.status)
        else:
            response = self.hub.answer(request)
        if fault is not None:
            response = fault.spoil(request, response)
        self.hub.note(self.command, path, str(response.status), len(request.body))
        self.write(response)

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = answer  # noqa: N815  # the names that http.server calls

    def read_body(self, *, half: bool = False) -> bytes:
        """The body of the request, or about half of what is on its way."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
                if half:
                    return b"".join(chunks)
            self.rfile.readline()
            return b"".join(chunks)
        length = int(self.headers.get("Content-Length") or 0)
        return self.rfile.read(length // 2 if half else length)

    def write(self, response: Response) -> None:
        self.send_response(response.status)
        for name, value in {"Content-Length": str(len(response.body)), **response.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if response.cut is None:
            self.wfile.write(response.body)
        else:
            self.wfile.write(response.body[: response.cut])
            self.hang_up()

    def hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
