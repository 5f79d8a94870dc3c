"""Endpoints that read: account, information about a repository, its files."""

from __future__ import annotations

import json
import re
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import yaml

from .messages import Request, Response, as_json
from .routes import route
from .store import MAIN, Commit, File, HubError

if TYPE_CHECKING:
    from .server import Hub

DATE = "2026-01-01T00:00:00.000Z"


@route("GET", "/api/whoami-v2")
def whoami(hub: Hub, request: Request) -> Response:
    user, role = hub.user(request)
    if user is None:
        raise HubError(401, "Invalid username or password.")
    token = {"displayName": "token", "role": role}
    return as_json({"type": "user", "name": user, "orgs": [], "auth": {"type": "access_token", "accessToken": token}})


@route("GET", "/api/models/{repo}/refs")
def refs(hub: Hub, request: Request, repo: str) -> Response:
    found = hub.store.readable(repo, hub.user(request)[0])
    heads = [{"name": n, "ref": f"refs/heads/{n}", "targetCommit": oid} for n, oid in found.branches.items()]
    return as_json({"branches": heads, "tags": [], "converts": []})


@route("GET", "/api/models/{repo}/revision/{revision}")
def info(hub: Hub, request: Request, repo: str, revision: str = MAIN) -> Response:
    found = hub.store.readable(repo, hub.user(request)[0])
    commit = found.at(revision)
    card = _metadata(commit)
    data: dict[str, Any] = {
        "_id": "0",
        "id": repo,
        "modelId": repo,
        "author": found.owner,
        "sha": commit.oid,
        "private": found.private,
        "lastModified": DATE,
        "createdAt": DATE,
        "gated": False,
        "disabled": False,
        "downloads": 0,
        "likes": 0,
        "tags": card.get("tags", []),
        "cardData": card,
        "siblings": [{"rfilename": path} for path in commit.files],
        "library_name": card.get("library_name"),
        "pipeline_tag": card.get("pipeline_tag"),
    }
    if "config.json" in commit.files:
        data["config"] = json.loads(commit.files["config.json"].data)
    return as_json(data)


@route("GET", "/api/models/{repo}/tree/{revision}")
@route("GET", "/api/models/{repo}/tree/{revision}/{path}")
def tree(hub: Hub, request: Request, repo: str, revision: str, path: str = "") -> Response:
    """All files below a path; the client of a model repository, which is flat, asks for nothing else."""
    commit = hub.store.readable(repo, hub.user(request)[0]).at(revision)
    below = unquote(path).rstrip("/") + "/" if path else ""
    files = {name: file for name, file in sorted(commit.files.items()) if name.startswith(below)}
    if below and not files:
        raise HubError(404, "Entry not found", "EntryNotFound", commit.oid)
    return as_json([_entry(hub, name, file) for name, file in files.items()])


# After every longer path: a repository's name matches most of them.
@route("GET", "/api/models/{repo}")
def main_info(hub: Hub, request: Request, repo: str) -> Response:
    return info(hub, request, repo)


@route("GET", "/{repo}/resolve/{revision}/{path}")
def resolve(hub: Hub, request: Request, repo: str, revision: str, path: str) -> Response:
    """A file itself, or for a large one where it lies and what it is."""
    commit = hub.store.readable(repo, hub.user(request)[0]).at(revision)
    file = commit.files.get(unquote(path))
    if file is None:
        raise HubError(404, "Entry not found", "EntryNotFound", commit.oid)
    headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{file.sha256 or file.oid}"'}
    if file.sha256 is None:
        return _bytes(request, file.data, headers)
    headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size)}
    if file.sha256 in hub.store.xet:
        token_url = f"{hub.url}/api/models/{repo}/xet-read-token/{commit.oid}"
        headers |= {"X-Xet-Hash": hub.store.xet[file.sha256], "Link": f'<{token_url}>; rel="xet-auth"'}
    return Response(302, b"", {**headers, "Location": f"{hub.storage_url}/objects/{file.sha256}"})


@route("GET", "/objects/{oid}")
def get(hub: Hub, request: Request, oid: str) -> Response:
    if oid not in hub.store.objects:
        raise HubError(404, "object not found")
    return _bytes(request, hub.store.objects[oid], {"ETag": f'"{oid}"'})


@route("GET", "/api/models/{repo}/xet-read-token/{revision}")
def xet_read(hub: Hub, request: Request, repo: str, revision: str) -> Response:
    hub.store.readable(repo, hub.user(request)[0])
    return _xet_token(hub)


@route("GET", "/api/models/{repo}/xet-write-token/{revision}")
def xet_write(hub: Hub, request: Request, repo: str, revision: str) -> Response:
    hub.store.writable(repo, *hub.user(request))
    return _xet_token(hub)


def _xet_token(hub: Hub) -> Response:
    if hub.xet is None:
        raise HubError(404, "this hub has no xet storage")
    where, token, until = f"local://{hub.xet}", "token", int(time.time()) + 3600
    headers = {"X-Xet-Cas-Url": where, "X-Xet-Access-Token": token, "X-Xet-Token-Expiration": str(until)}
    return as_json({"casUrl": where, "accessToken": token, "exp": until}, 200, headers)


def _bytes(request: Request, data: bytes, headers: dict[str, str]) -> Response:
    """All of it, or the range that was asked for."""
    headers = {**headers, "Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
    wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", ""))
    if wanted is None:
        return Response(200, data, headers)
    first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
    if first >= len(data):
        return Response(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
    return Response(206, data[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"})


def _entry(hub: Hub, name: str, file: File) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": file.size, "oid": file.oid}
    if file.sha256 is not None:
        entry["lfs"] = {"oid": file.sha256, "size": file.size, "pointerSize": 134}
        if file.sha256 in hub.store.xet:
            entry["xetHash"] = hub.store.xet[file.sha256]
    return entry


def _metadata(commit: Commit) -> dict[str, Any]:
    """The block of YAML at the head of the card."""
    card = commit.files.get("README.md")
    block = re.match(rb"---\r?\n(.*?)\r?\n---", card.data, re.DOTALL) if card else None
    return (yaml.safe_load(block[1]) or {}) if block else {}
