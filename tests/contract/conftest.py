"""A registry that a test may change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hf_attn_swap.variants.base import VARIANTS


@pytest.fixture
def registry_as_before() -> Iterator[None]:
    """Takes what a test registers out of the registry again."""
    before = dict(VARIANTS)
    yield
    VARIANTS.clear()
    VARIANTS.update(before)
