"""A Hugging Face Hub on 127.0.0.1, for huggingface_hub's own client: `with Hub() as hub: ... hub.env(home)`.

It answers what the client asks to publish a model (large files by LFS, then one commit) and to load it again.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

WRITER, READER = "hf_me_write", "hf_me_read"  # the tokens of the only user, who is called "me"
UNSET = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
REPO, REVISION = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"
ROUTES = {
    ("POST", "/api/repos/create"): "create",
    ("GET", f"/api/models/{REPO}(/revision/{REVISION})?"): "info",
    ("GET", f"/api/models/{REPO}/tree/{REVISION}(/(?P<path>.+))?"): "tree",
    ("POST", f"/api/models/{REPO}/branch/{REVISION}"): "branch",
    ("POST", "/api/validate-yaml"): "validate_yaml",
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}"): "preupload",
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch"): "batch",
    ("PUT", "/objects/(?P<oid>[0-9a-f]{64})"): "upload",
    ("POST", f"/api/models/{REPO}/commit/{REVISION}"): "commit",
    ("GET", f"/{REPO}/resolve/{REVISION}/(?P<path>.+)"): "resolve",
}


class HubError(Exception):
    """An answer other than success; the client makes its exception from the code."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Repository:
    """A model repository: the files of every commit, and the newest commit of every branch."""

    private: bool
    commits: list[dict[str, bytes]] = field(default_factory=lambda: [{}])
    titles: list[str] = field(default_factory=lambda: ["initial commit"])
    branches: dict[str, int] = field(default_factory=lambda: {"main": 0})

    def number(self, revision: str | None) -> int:
        """The number of the commit of a branch, or of the commit's own name."""
        name = unquote(revision or "main").removeprefix("refs/heads/")
        if name in self.branches:
            return self.branches[name]
        if re.fullmatch("[0-9a-f]{40}", name) and int(name, 16) < len(self.commits):
            return int(name, 16)
        raise HubError(404, f"Invalid rev id: {name}", "RevisionNotFound")

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.number(revision)]


class Hub:
    """The server, with every request in `log` as method and path."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.log: list[tuple[str, str]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubHandler", (Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def env(self, home: Path, token: str | None = WRITER) -> dict[str, str]:
        """The environment of a client with this cache and token."""
        settings = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
        settings |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        settings |= {} if token is None else {"HF_TOKEN": token}
        return {key: value for key, value in os.environ.items() if key not in UNSET} | settings

    def readable(self, repo: str, token: str) -> Repository:
        """The repository, for a reader who may see it; nobody else learns that it exists."""
        repository = self.repositories.get(repo)
        if repository is None or (repository.private and token not in (WRITER, READER)):
            raise HubError(404 if token else 401, "Repository not found", "RepoNotFound")
        return repository

    def writable(self, repo: str, token: str) -> Repository:
        repository = self.readable(repo, token)
        if token != WRITER:
            raise HubError(403, "Forbidden: you must use a write token.")
        return repository

    def create(self, token: str, asked: Any) -> Any:
        if token != WRITER:
            raise HubError(403 if token else 401, "Forbidden: you must use a write token.")
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        url = {"url": f"{self.url}/{name}", "name": name}
        if name in self.repositories:
            return url | {"error": "You already created this model repo", "status": 409}
        private = bool(asked.get("private")) or asked.get("visibility") == "private"
        self.repositories[name] = Repository(private)
        return url

    def info(self, token: str, asked: Any, repo: str, revision: str | None) -> Any:
        repository = self.readable(repo, token)
        siblings = [{"rfilename": path} for path in repository.files(revision or "main")]
        sha = f"{repository.number(revision):040x}"
        return {"_id": "0", "id": repo, "sha": sha, "private": repository.private, "tags": [], "siblings": siblings}

    def tree(self, token: str, asked: Any, repo: str, revision: str, path: str | None) -> Any:
        below = "" if path is None else unquote(path).rstrip("/") + "/"
        files = {
            name: data
            for name, data in self.readable(repo, token).files(revision).items()
            if name[: len(below)] == below
        }
        if below and not files:
            raise HubError(404, "Entry not found", "EntryNotFound")
        return [{"type": "file", "path": name, "size": len(data), "oid": sha256(data)} for name, data in files.items()]

    def branch(self, token: str, asked: Any, repo: str, revision: str) -> Any:
        repository = self.writable(repo, token)
        if unquote(revision) in repository.branches:
            raise HubError(409, "Reference already exists")
        repository.branches[unquote(revision)] = repository.number(asked.get("startingPoint"))
        return {}

    def validate_yaml(self, token: str, asked: Any) -> Any:
        right = re.match(r"---\n.*?\n---\n", asked["content"], re.DOTALL)
        return {"errors": [], "warnings": [] if right else [{"message": "empty or missing yaml metadata"}]}

    def preupload(self, token: str, asked: Any, repo: str, revision: str) -> Any:
        """Which files go into the commit itself, and which by LFS."""
        self.writable(repo, token).number(revision)
        modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in asked["files"]}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    def batch(self, token: str, asked: Any, repo: str) -> Any:
        """Where large files are to be put."""
        self.writable(repo, token)
        actions = {file["oid"]: {"upload": {"href": f"{self.url}/objects/{file['oid']}"}} for file in asked["objects"]}
        return {
            "transfer": "basic",
            "objects": [{**file, "actions": actions[file["oid"]]} for file in asked["objects"]],
        }

    def upload(self, token: str, asked: bytes, oid: str) -> Any:
        if sha256(asked) != oid:
            raise HubError(400, "the bytes do not have this sha256")
        self.objects[oid] = asked
        return {}

    def commit(self, token: str, asked: list[Any], repo: str, revision: str) -> Any:
        """One commit, all or nothing: the branch moves after every operation has been read."""
        repository, name = self.writable(repo, token), unquote(revision)
        files = dict(repository.files(name))
        header = asked[0]["value"]
        if header.get("parentCommit") not in (None, f"{repository.number(name):040x}"):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        for operation in asked[1:]:
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.objects[value["oid"]]
            else:
                assert operation["key"] == "deletedFile"
                del files[value["path"]]
        repository.commits.append(files)
        repository.titles.append(header["summary"])
        repository.branches[name] = len(repository.commits) - 1
        oid = f"{repository.branches[name]:040x}"
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{repo}/commit/{oid}", "hookOutput": ""}

    def resolve(self, token: str, asked: Any, repo: str, revision: str, path: str) -> bytes:
        files = self.readable(repo, token).files(revision)
        if unquote(path) not in files:
            raise HubError(404, "Entry not found", "EntryNotFound")
        return files[unquote(path)]


class Handler(BaseHTTPRequestHandler):
    """One connection of the client; `hub` is set on the subclass that a server makes for itself."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: Any) -> None:
        """Nothing to stderr: the hub keeps a log of its own."""

    def answer(self) -> None:
        path, body = urlsplit(self.path).path, b"".join(self.body())
        self.hub.log.append((self.command, path))
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        headers = {"Content-Type": "application/json"}
        try:
            status, answer = 200, self.call(path, token, body)
            if isinstance(answer, dict):
                status = answer.pop("status", 200)
        except HubError as problem:
            status, answer = problem.status, {"error": str(problem)}
            headers |= {"X-Error-Message": str(problem)} | ({"X-Error-Code": problem.code} if problem.code else {})
        if isinstance(answer, bytes):
            repo, _, rest = path[1:].partition("/resolve/")
            commit = f"{self.hub.repositories[repo].number(rest.split('/')[0]):040x}"
            headers = {"X-Repo-Commit": commit, "ETag": f'"{sha256(answer)}"'}
        else:
            answer = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(answer)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815  # the names that http.server calls

    def call(self, path: str, token: str, body: bytes) -> Any:
        """The answer of the first endpoint that matches; a HEAD is a GET whose body is not sent."""
        method = "GET" if self.command == "HEAD" else self.command
        for (wanted, pattern), name in ROUTES.items():
            if method == wanted and (match := re.fullmatch(pattern, path)):
                asked: Any = body
                if name == "commit":
                    asked = [json.loads(line) for line in body.splitlines() if line]
                elif name != "upload":
                    asked = json.loads(body or b"{}")
                return getattr(self.hub, name)(token, asked, **match.groupdict())
        raise HubError(404, f"no endpoint {method} {path}")

    def body(self) -> Iterator[bytes]:
        """The parts of the request's body."""
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            yield self.rfile.read(int(self.headers.get("Content-Length") or 0))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
