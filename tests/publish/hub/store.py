"""What the Hub keeps: repositories as chains of immutable commits, large objects, and who may read or write."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import unquote

WRITER, READER, STRANGER = "hf_me_write", "hf_me_read", "hf_stranger_write"
USERS = {WRITER: ("me", "write"), READER: ("me", "read"), STRANGER: ("stranger", "write")}
MAIN = "main"


class HubError(Exception):
    """An answer other than success, with the headers from which the client builds its exception."""

    def __init__(self, status: int, message: str, code: str = "", commit: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message}
        if code:
            self.headers["X-Error-Code"] = code
        if commit:
            self.headers["X-Repo-Commit"] = commit


@dataclass(frozen=True)
class File:
    """A file of a commit: its bytes, or the sha256 of a large object."""

    oid: str
    size: int
    data: bytes = b""
    sha256: str | None = None


def regular_file(data: bytes) -> File:
    return File(oid=git_oid(data), size=len(data), data=data)


def large_file(sha256: str, size: int) -> File:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    return File(oid=git_oid(pointer.encode()), size=size, sha256=sha256)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: str | None
    title: str
    files: Mapping[str, File]


@dataclass
class Repository:
    """A model repository; every change of a branch is one new commit."""

    name: str
    private: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.commit(MAIN, {}, "initial commit")

    @property
    def owner(self) -> str:
        return self.name.split("/")[0]

    def commit(self, branch: str, files: Mapping[str, File], title: str) -> Commit:
        """Move a branch to a new commit with exactly these files."""
        parent = self.branches.get(branch)
        oid = hashlib.sha1(f"{self.name} {branch} {len(self.commits)} {title}".encode()).hexdigest()
        self.commits[oid] = Commit(oid=oid, parent=parent, title=title, files=dict(files))
        self.branches[branch] = oid
        return self.commits[oid]

    def at(self, revision: str = MAIN) -> Commit:
        """The commit of a branch, or of its own name."""
        revision = unquote(revision).removeprefix("refs/heads/")
        oid = self.branches.get(revision, revision)
        if oid not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[oid]

    def history(self, branch: str = MAIN) -> list[Commit]:
        """The commits of a branch, the newest first."""
        found: list[Commit] = []
        oid: str | None = self.branches[branch]
        while oid is not None:
            found.append(self.commits[oid])
            oid = found[-1].parent
        return found


@dataclass
class Store:
    """Everything on the Hub.

    Attributes:
        objects: bytes of large files by sha256.
        parts: of multipart uploads not completed yet, by sha256 and number.
        xet: xet hash of large files by sha256; their bytes lie in the client's local store.
    """

    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    parts: dict[tuple[str, int], bytes] = field(default_factory=dict)
    xet: dict[str, str] = field(default_factory=dict)

    def create(self, name: str, user: str, *, private: bool) -> Repository:
        if name.split("/")[0] != user:
            raise HubError(403, f"You don't have the rights to create a model under the namespace {name.split('/')[0]}")
        if name in self.repositories:
            raise HubError(409, "You already created this model repo")
        self.repositories[name] = Repository(name, private)
        return self.repositories[name]

    def readable(self, name: str, user: str | None) -> Repository:
        """The repository, if this user may see it; nobody learns whether a hidden one exists."""
        found = self.repositories.get(name)
        if found is None or (found.private and user != found.owner):
            raise HubError(401 if user is None else 404, "Repository not found", "RepoNotFound")
        return found

    def writable(self, name: str, user: str | None, role: str) -> Repository:
        found = self.readable(name, user)
        if user is None:
            raise HubError(401, "Invalid username or password.")
        if user != found.owner or role != "write":
            raise HubError(403, "Forbidden: you must use a write token to upload to a repository.")
        return found

    def put(self, sha256: str, data: bytes) -> None:
        """Keep a large object, if it is what it says."""
        if hashlib.sha256(data).hexdigest() != sha256:
            raise HubError(400, "the bytes do not have this sha256")
        self.objects[sha256] = data

    def join(self, sha256: str, numbers: list[int]) -> None:
        """Complete a multipart upload."""
        missing = [number for number in numbers if (sha256, number) not in self.parts]
        if missing or numbers != list(itertools.islice(itertools.count(1), len(numbers))):
            raise HubError(400, f"parts are missing: {missing}")
        self.put(sha256, b"".join(self.parts.pop((sha256, number)) for number in numbers))
