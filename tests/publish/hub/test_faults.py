"""What goes wrong on the way to the Hub and back: an error, or a retry that ends well, but never half a model."""

from __future__ import annotations

import json
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from .client import RemoteError
from .conftest import Setup
from .store import READER, STRANGER, WRITER, Commit

REPO = "me/faults"
COMMIT, OBJECTS = "/commit/", "^/objects/"


@pytest.fixture
def bert(world: Setup) -> dict[str, Any]:
    """A model with two files to upload, other at each push so that there is something to commit."""
    if REPO not in world.hub.store.repositories:
        push(world, "belief_star")
    return {"repo": REPO, "family": "bert", "answer": answer(world, "belief_star")}


def answer(world: Setup, variant: str) -> str:
    return str(world.folder / f"faults-{variant}.pt")


def push(world: Setup, variant: str, repo: str = REPO, **arguments: Any) -> None:
    arguments = {"repo": repo, "family": "bert", "variant": variant, "answer": answer(world, variant), **arguments}
    world.publisher.call("publish", **arguments)


def state(world: Setup, repo: str = REPO) -> dict[str, Commit]:
    repository = world.hub.repository(repo)
    return {branch: repository.at(branch) for branch in repository.branches}


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"kind": "status", "status": 500}, "HfHubHTTPError"),
        ({"kind": "status", "status": 403}, "HfHubHTTPError"),
        ({"kind": "status", "status": 412}, "HfHubHTTPError"),
        ({"kind": "drop"}, "TransportError"),
    ],
    ids=lambda value: str(value),
)
def test_a_commit_that_fails_leaves_the_repository_as_it_was(
    world: Setup, bert: dict[str, Any], fault: dict[str, Any], kind: str
) -> None:
    before = state(world)
    world.hub.fail("POST", COMMIT, **fault)
    with pytest.raises(RemoteError) as error:
        push(world, "gated")
    assert kind in error.value.kinds
    assert state(world) == before
    assert world.reader.call("load", **bert)["equal"]


def test_a_retry_after_a_failed_commit(world: Setup) -> None:
    repo = "me/retried"
    world.hub.fail("POST", COMMIT)
    with pytest.raises(RemoteError):
        push(world, "gated", repo)
    assert list(state(world, repo)["main"].files) == []
    push(world, "gated", repo)
    loaded = world.reader.call("load", repo=repo, family="bert", answer=answer(world, "gated"))
    assert loaded["equal"]


@pytest.mark.parametrize(("kind", "status"), [("status", 500), ("status", 503), ("drop", 0)])
def test_the_client_retries_an_upload_that_breaks(world: Setup, kind: str, status: int) -> None:
    struck = world.hub.fail("PUT", OBJECTS, kind, status=status)
    arguments = {"repo": f"me/broken-{kind}-{status}", "family": "bert", "answer": str(world.folder / "broken.pt")}
    config = {"vocab_size": 20_000 + status}  # another file each time: the Hub does not ask for one that it has
    world.publisher.call("publish", variant="gated", config=config, **arguments)
    assert struck.matches == 2
    assert world.reader.call("load", **arguments)["equal"]


@pytest.mark.slow
def test_an_upload_that_never_works_is_an_error(world: Setup, bert: dict[str, Any]) -> None:
    before = state(world)
    world.hub.fail("PUT", OBJECTS, times=None)
    arguments = {"repo": REPO, "family": "bert", "answer": str(world.folder / "never.pt")}
    with pytest.raises(RemoteError, match="500"):
        world.publisher.call("publish", variant="gated", config={"vocab_size": 999}, **arguments)
    assert state(world) == before


def test_an_existing_repository_is_no_error(world: Setup, bert: dict[str, Any]) -> None:
    push(world, "belief_star", revision="other")
    push(world, "belief_star", revision="other")
    conflicts = [entry.path for entry in world.hub.log if entry.status == "409"]
    assert conflicts == ["/api/repos/create", "/api/repos/create", f"/api/models/{REPO}/branch/other"]
    del world.hub.repository(REPO).branches["other"]


@pytest.mark.parametrize(
    ("token", "status", "words"),
    [
        ("hf_unknown", 401, "401"),
        (READER, 403, "403 Forbidden"),
        (STRANGER, 403, "403 Forbidden"),
    ],
)
def test_pushing_without_the_right(world: Setup, bert: dict[str, Any], token: str, status: int, words: str) -> None:
    before = state(world)
    with pytest.raises(RemoteError, match=words) as error:
        push(world, "gated", token=token)
    assert "HfHubHTTPError" in error.value.kinds
    assert str(status) in {entry.status for entry in world.hub.log}
    assert state(world) == before


def test_pushing_without_a_token(world: Setup, bert: dict[str, Any]) -> None:
    before = state(world)
    with pytest.raises(RemoteError, match="401"):
        world.reader.call("publish", variant="gated", **bert | {"answer": str(world.folder / "unused.pt")})
    assert state(world) == before


def test_private_repository(world: Setup) -> None:
    repo, arguments = "me/private", {"family": "bert", "answer": answer(world, "gated")}
    push(world, "gated", repo, private=True)
    assert world.hub.repository(repo).private
    for token in (None, STRANGER, "hf_unknown"):
        with pytest.raises(RemoteError) as error:
            world.reader.call("load", repo=repo, token=token, **arguments)
        assert "OSError" in error.value.kinds
    assert world.reader.call("load", repo=repo, token=WRITER, **arguments)["equal"]
    assert world.reader.call("load", repo=repo, token=READER, by="AutoModelForMaskedLM", **arguments)["equal"]
    push(world, "belief", repo, private=True)


def test_what_is_meant_to_be_private_is_not_published(world: Setup, bert: dict[str, Any]) -> None:
    before = state(world)
    with pytest.raises(RemoteError, match="ValueError: me/faults exists and everybody can read it"):
        push(world, "gated", private=True)
    assert state(world) == before


def test_a_download_that_breaks_off_is_resumed(world: Setup, bert: dict[str, Any], tmp_path: Path) -> None:
    struck = world.hub.fail("GET", OBJECTS, "cut")
    assert world.reader.call("load", cache_dir=str(tmp_path), **bert)["equal"]
    assert struck.matches == 2


@pytest.mark.parametrize("path", [OBJECTS, "/config.json$"])
@pytest.mark.parametrize(("kind", "words"), [("short", "OSError: .*size"), ("flip", "ValueError: .*was damaged")])
def test_damaged_download_is_an_error(
    world: Setup, bert: dict[str, Any], tmp_path: Path, path: str, kind: str, words: str
) -> None:
    cache = str(tmp_path)
    struck = world.hub.fail("GET", path, kind, times=None)
    with pytest.raises(RemoteError, match=words):
        world.reader.call("load", cache_dir=cache, **bert)
    assert struck.matches >= 1
    world.hub.heal()
    assert world.reader.call("load", cache_dir=cache, **bert)["equal"], "the damaged file is not kept"


def test_damaged_cache_is_an_error(world: Setup, bert: dict[str, Any], tmp_path: Path) -> None:
    cache = str(tmp_path)
    world.reader.call("load", cache_dir=cache, **bert)
    blob = next(Path(cache).rglob("model.safetensors")).resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    with pytest.raises(RemoteError, match=r"ValueError: model\.safetensors of me/faults was damaged"):
        world.reader.call("load", cache_dir=cache, **bert)


def test_offline_after_a_download(world: Setup, bert: dict[str, Any], tmp_path: Path) -> None:
    cache = str(tmp_path)
    with pytest.raises(RemoteError, match="local"):
        world.reader.call("load", cache_dir=cache, local_files_only=True, **bert)
    world.reader.call("load", cache_dir=cache, **bert)
    world.hub.log.clear()
    assert world.reader.call("load", cache_dir=cache, local_files_only=True, **bert)["equal"]
    assert world.hub.log == []


def test_the_hub_commits_all_or_nothing(world: Setup, bert: dict[str, Any]) -> None:
    """Of the server itself: the second operation cannot be done, so the first is not."""
    before = state(world)
    operations = [
        {"key": "header", "value": {"summary": "half"}},
        {"key": "deletedFile", "value": {"path": "config.json"}},
        {"key": "lfsFile", "value": {"path": "model.safetensors", "algo": "sha256", "oid": "0" * 64, "size": 1}},
    ]
    connection = HTTPConnection("127.0.0.1", world.hub.port)
    body = "\n".join(json.dumps(operation) for operation in operations)
    connection.request("POST", f"/api/models/{REPO}/commit/main", body, {"Authorization": f"Bearer {WRITER}"})
    assert connection.getresponse().status == 400
    connection.close()
    assert state(world) == before
