"""A conversion in half precision says so where the processor is slow at it."""

from __future__ import annotations

import pytest
import torch

from hf_attn_swap.conversion import half_precision

from .converting import stock


@pytest.mark.parametrize(
    ("ratio", "dtype", "told"), [(60, "bfloat16", True), (1, "bfloat16", False), (60, "float32", False)]
)
def test_slow_products_are_told(
    ratio: int, dtype: str, told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(half_precision, "seconds", {torch.bfloat16: ratio, torch.float32: 1}.__getitem__)
    half_precision.tell_if_slow(stock("llama").to(getattr(torch, dtype)))
    assert (f"in bfloat16: they take {ratio} times as long" in caplog.text) == told
    assert bool(caplog.records) == told
