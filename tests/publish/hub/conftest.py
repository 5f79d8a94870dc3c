"""A Hub, and clients of it in processes of their own, each with an empty cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from .client import Client
from .server import Hub
from .store import WRITER

PART_SIZE = 12_000_000  # a file of more than 10 MB still goes in one piece


class Setup(NamedTuple):
    """A Hub, a client that pushes, another that loads, and a folder for what they compare."""

    hub: Hub
    publisher: Client
    reader: Client
    folder: Path


@contextmanager
def setup(folder: Path, *, part_size: int | None = None, xet: Path | None = None) -> Iterator[Setup]:
    with Hub(part_size=part_size, xet=xet) as hub:
        publisher, reader = (
            Client(hub.env(folder / name, token), folder / f"{name}.log")
            for name, token in (("publisher", WRITER), ("reader", None))
        )
        try:
            yield Setup(hub, publisher, reader, folder)
        finally:
            publisher.close()
            reader.close()


@pytest.fixture(scope="session")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with setup(tmp_path_factory.mktemp("hub"), part_size=PART_SIZE) as running:
        yield running


@pytest.fixture
def world(started: Setup) -> Iterator[Setup]:
    """The same Hub for all tests, without the faults of the last one."""
    started.hub.heal()
    started.hub.log.clear()
    yield started
    started.hub.heal()


@pytest.fixture(scope="session")
def xet_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    folder = tmp_path_factory.mktemp("xet-hub")
    with setup(folder, xet=folder / "store") as running:
        yield running
