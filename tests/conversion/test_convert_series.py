"""A forecaster is converted without labels: its hidden states teach, and its forecast is what is measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers import PatchTSTConfig, PatchTSTForPrediction

from hf_attn_swap import convert


def forecaster() -> PatchTSTForPrediction:
    torch.manual_seed(0)
    config = PatchTSTConfig(
        num_input_channels=2,
        context_length=32,
        prediction_length=4,
        patch_length=4,
        patch_stride=4,
        d_model=16,
        ffn_dim=32,
        num_attention_heads=2,
        num_hidden_layers=2,
        init_std=0.4,
    )
    return PatchTSTForPrediction(config).eval()


def windows(count: int) -> list[dict[str, Tensor]]:
    rows = torch.arange(count + 32) / 3
    series = torch.stack([rows.sin(), (rows / math.pi).sin()], 1) + 0.1 * torch.randn(len(rows), 2)
    return [{"past_values": series[start : start + 32]} for start in range(count)]


@pytest.mark.parametrize("variant", ["outeffhop", "belief", "sink"])
def test_a_forecaster_without_labels(variant: str) -> None:
    model, rows = forecaster(), windows(96)
    held = {"past_values": torch.stack([row["past_values"] for row in windows(8)])}
    with torch.no_grad():
        before = model(**held).prediction_outputs
    report = convert(model, variant, rows, eval_data=windows(8), tokens=192, progress=False)
    assert sum(step.tokens for step in report.steps) == 192
    with torch.no_grad():
        after = model.eval()(**held).prediction_outputs
    assert not torch.equal(after, before)
    assert report.lost.measure == "relative squared error of the outputs"
    assert report.lost.divergence_or_error <= report.steps[0].lost.divergence_or_error + 1e-6
