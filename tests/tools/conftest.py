"""Tiny converted models with a tokenizer of bytes, as folders that other people's tools load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hf_attn_swap import patch_model
from tests.harness.byte_tokenizer import build


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with a converted model of some architecture and its tokenizer or image processor."""

    def make(architecture: str, variant: str, head: str | None = None, **config: Any) -> Path:
        model, processor = build(architecture, head, **config)
        folder = tmp_path / f"{architecture}-{variant}"
        patch_model(model, variant).save_pretrained(folder)
        processor.save_pretrained(folder)
        return folder

    return make
