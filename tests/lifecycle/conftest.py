"""Fixtures: frozen objects of imports, as in the contract tests, so that garbage collection is fast; no old graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.contract.conftest import _frozen_collector  # noqa: F401  # a fixture, found by its name


@pytest.fixture
def _forget_graphs() -> Iterator[None]:
    """A compiler starts without the graphs of other tests, and leaves none."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
