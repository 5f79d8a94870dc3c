"""Makes the tests faster: `--shard 1/4` runs a fourth of them, and what imports leave is not searched every time."""

from __future__ import annotations

import gc
import re
import zlib

import pytest

# Helpers that assert say what was unequal, as test files do. (Before anything imports them.)
pytest.register_assert_rewrite("tests.harness", "tests.contract", "tests.kernels")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--shard K/N` on the command line."""
    parser.addoption("--shard", metavar="K/N", help="run the K-th of N parts of the tests; together they are all tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of this part."""
    if (wanted := config.getoption("shard")) is None:
        return
    shard = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", wanted)
    if shard is None or int(shard[1]) > int(shard[2]):
        raise pytest.UsageError(f"--shard takes K/N with 1 <= K <= N, such as 1/4; got {wanted!r}")
    part, parts = int(shard[1]) - 1, int(shard[2])
    others = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts != part]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % parts == part]


def pytest_collectstart() -> None:
    """Before each test file is imported: take the objects of the files before out of the garbage collector.

    `patch_model` looks for optimizers among all objects that Python's garbage collector knows, and the imports of all
    tests together make this ten times slower than a swap itself.
    """
    gc.freeze()


def pytest_collection_finish() -> None:
    """After all test files are imported: the same, without what nobody holds any more."""
    gc.collect()
    gc.freeze()
