"""A compiler without old graphs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def _forget_graphs() -> Iterator[None]:
    """A compiler starts without the graphs of other tests, and leaves none."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
