"""Fixtures: garbage collection that stays fast over many tests, and a registry that a test may change."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from hf_attn_swap.variants.base import VARIANTS


@pytest.fixture(autouse=True, scope="session")
def _frozen_collector() -> None:
    """`patch_model` looks for optimizers among all tracked objects: half a million, few of them ours."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()


@pytest.fixture
def registry_as_before() -> Iterator[None]:
    """Takes what a test registers out of the registry again."""
    before = dict(VARIANTS)
    yield
    VARIANTS.clear()
    VARIANTS.update(before)
