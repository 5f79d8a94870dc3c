"""Freezes the objects that imports and test collection made, so that garbage collection stays fast over many tests."""

from __future__ import annotations

import gc

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _frozen_collector() -> None:
    """`patch_model` looks for optimizers among all tracked objects: half a million, few of them ours."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
