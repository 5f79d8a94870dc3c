"""Variants in files of a user's own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_attn_swap.variants.base import VARIANTS

DAMPED = """
import torch

from hf_attn_swap.variants.base import Variant, register


@register("damped")
class Damped(Variant):
    places = ("read",)

    def __init__(self, options, geometry):
        super().__init__(options, geometry)
        self.volume = torch.nn.Parameter(torch.empty(geometry.heads, 1))

    @torch.no_grad()
    def reset(self, generator):
        self.volume.fill_(0.5)

    def read(self, heads_BLHD, call):
        strength = call.strength_in(heads_BLHD.dtype)
        return heads_BLHD * (1 - strength + strength * self.volume.to(heads_BLHD.dtype))
"""
CAPPED = """
from hf_attn_swap.variants.base import Variant, register


@register("capped")
class Capped(Variant):
    places = ("scores",)

    def score_mod(self, score, batch, head, q_idx, kv_idx):
        return score.clamp(-0.1, 0.1)
"""
CODE = {"damped": DAMPED, "capped": CAPPED}


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with `damped.py` and `capped.py`, which are imported until the test ends."""
    folder, before = tmp_path / "own", dict(VARIANTS)
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    for name, code in CODE.items():
        (folder / f"{name}.py").write_text(code)
        importlib.import_module(name)
    yield folder
    for name in CODE:
        del sys.modules[name]
    VARIANTS.clear()
    VARIANTS.update(before)
