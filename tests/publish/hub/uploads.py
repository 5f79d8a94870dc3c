"""Endpoints that create and change repositories."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import yaml

from . import xet
from .messages import Request, Response, as_json
from .routes import route
from .store import MAIN, File, HubError, large_file, regular_file

if TYPE_CHECKING:
    from .server import Hub

LARGE = (".safetensors", ".bin", ".pt", ".onnx", ".model")  # what a new repository tracks as large files
LARGEST_REGULAR = 10_000_000


@route("POST", "/api/repos/create")
def create(hub: Hub, request: Request) -> Response:
    user, role = hub.user(request)
    if user is None:
        raise HubError(401, "Invalid username or password.")
    if role != "write":
        raise HubError(403, "Forbidden: you must use a write token.")
    name = f"{request.json.get('organization') or user}/{request.json['name']}"
    url = {"url": f"{hub.url}/{name}", "name": name}
    if name in hub.store.repositories and hub.store.repositories[name].owner == user:
        return as_json({"error": "You already created this model repo", **url}, 409)
    private = bool(request.json.get("private")) or request.json.get("visibility") == "private"
    hub.store.create(name, user, private=private)
    return as_json(url)


@route("DELETE", "/api/repos/delete")
def delete(hub: Hub, request: Request) -> Response:
    user, role = hub.user(request)
    name = f"{request.json.get('organization') or user}/{request.json['name']}"
    hub.store.writable(name, user, role)
    del hub.store.repositories[name]
    return as_json({})


@route("POST", "/api/models/{repo}/branch/{revision}")
def branch(hub: Hub, request: Request, repo: str, revision: str) -> Response:
    found = hub.store.writable(repo, *hub.user(request))
    if unquote(revision) in found.branches:
        raise HubError(409, "Reference already exists")
    found.branches[unquote(revision)] = found.at(request.json.get("startingPoint") or MAIN).oid
    return as_json({})


@route("POST", "/api/validate-yaml")
def validate_yaml(hub: Hub, request: Request) -> Response:
    block = re.match(r"\s*---\r?\n(.*?)\r?\n---", request.json["content"], re.DOTALL)
    warnings = [] if block else [{"message": "empty or missing yaml metadata in repo card"}]
    errors = []
    try:
        data = yaml.safe_load(block[1]) if block else {}
        for name, kind in (("license", (str, list)), ("tags", list), ("datasets", (str, list)), ("model-index", list)):
            if name in data and not isinstance(data[name], kind):
                errors.append({"message": f'"{name}" has the wrong type'})
    except yaml.YAMLError as problem:
        errors.append({"message": f"not YAML: {problem}"})
    return as_json({"errors": errors, "warnings": warnings}, 400 if errors else 200)


@route("POST", "/api/models/{repo}/preupload/{revision}")
def preupload(hub: Hub, request: Request, repo: str, revision: str) -> Response:
    """Which files go into the commit itself, and which are large."""
    commit = hub.store.writable(repo, *hub.user(request)).at(revision)
    files = []
    for file in request.json["files"]:
        binary = b"\0" in base64.b64decode(file["sample"])
        large = file["path"].endswith(LARGE) or file["size"] > LARGEST_REGULAR or binary
        old = commit.files.get(file["path"])
        oid = None if old is None else old.sha256 or old.oid
        mode = "lfs" if large else "regular"
        files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return as_json({"files": files, "commitOid": commit.oid})


@route("POST", "/{repo}.git/info/lfs/objects/batch")
def batch(hub: Hub, request: Request, repo: str) -> Response:
    """Where to put large files: one URL each, or one per part."""
    hub.store.writable(repo, *hub.user(request))
    objects = []
    for asked in request.json["objects"]:
        oid, size = asked["oid"], asked["size"]
        entry: dict[str, Any] = {"oid": oid, "size": size}
        if oid not in hub.store.objects:
            upload: dict[str, Any] = {"href": f"{hub.storage_url}/objects/{oid}"}
            if hub.part_size is not None and size > hub.part_size:
                count = -(-size // hub.part_size)
                urls = {f"{i:05d}": f"{hub.storage_url}/objects/{oid}/parts/{i}" for i in range(1, count + 1)}
                upload = {"href": f"{hub.url}/objects/{oid}/complete"}
                upload["header"] = {"chunk_size": str(hub.part_size), **urls}
            entry["actions"] = {"upload": upload, "verify": {"href": f"{hub.url}/objects/{oid}/verify"}}
        objects.append(entry)
    return as_json({"transfer": "basic", "objects": objects})


@route("PUT", "/objects/{oid}")
def put(hub: Hub, request: Request, oid: str) -> Response:
    hub.store.put(oid, request.body)
    return Response()


@route("PUT", "/objects/{oid}/parts/{number}")
def put_part(hub: Hub, request: Request, oid: str, number: str) -> Response:
    hub.store.parts[oid, int(number)] = request.body
    return Response(headers={"ETag": f'"{hashlib.md5(request.body).hexdigest()}"'})


@route("POST", "/objects/{oid}/complete")
def complete(hub: Hub, request: Request, oid: str) -> Response:
    hub.store.join(oid, [part["partNumber"] for part in request.json["parts"]])
    return as_json({"success": True})


@route("POST", "/objects/{oid}/verify")
def verify(hub: Hub, request: Request, oid: str) -> Response:
    if len(hub.store.objects.get(oid, b"")) != request.json["size"]:
        raise HubError(404, "object not found")
    return as_json({})


@route("POST", "/api/models/{repo}/commit/{revision}")
def commit(hub: Hub, request: Request, repo: str, revision: str) -> Response:
    """One commit, all or nothing: the branch moves only after every operation has been read."""
    found = hub.store.writable(repo, *hub.user(request))
    parent, name = found.at(revision), unquote(revision)
    files, title = dict(parent.files), ""
    for line in filter(None, request.body.split(b"\n")):
        operation = json.loads(line)
        value = operation["value"]
        if operation["key"] == "header":
            title = value["summary"]
            if value.get("parentCommit") not in (None, parent.oid):
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
        else:
            _apply(hub, files, operation["key"], value)
    new = found.commit(name, files, title)
    url = f"{hub.url}/{repo}/commit/{new.oid}"
    return as_json({"success": True, "commitOid": new.oid, "commitUrl": url, "hookOutput": ""})


def _apply(hub: Hub, files: dict[str, File], key: str, value: dict[str, Any]) -> None:
    """One operation of a commit, on the files it is going to have."""
    path = value["path"]
    if key == "file":
        files[path] = regular_file(base64.b64decode(value["content"]))
    elif key == "lfsFile":
        if hub.xet is not None and value["oid"] not in hub.store.objects:
            hub.store.xet |= xet.known_files(hub.xet)
        if value["oid"] not in hub.store.objects and value["oid"] not in hub.store.xet:
            raise HubError(400, f"{path} points to a large object that was not uploaded: {value['oid']}")
        files[path] = large_file(value["oid"], value["size"])
    elif key in ("deletedFile", "deletedFolder"):
        gone = [name for name in files if name == path or name.startswith(path.rstrip("/") + "/")]
        if not gone:
            raise HubError(404, "A file with this name doesn't exist", "EntryNotFound")
        for name in gone:
            del files[name]
    else:
        raise HubError(400, f"unknown operation {key}")
