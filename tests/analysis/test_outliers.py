"""Outliers of the hidden states, beside NumPy, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hf_attn_swap.analysis.outliers import outliers
from tests.contract.harness import batch_of, fresh, padding_side, refused


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "t5"])
def test_they_are_the_formulas_without_padding(name: str) -> None:
    model = fresh(name, torch.float32).train()
    batches = [batch_of(name, torch.float32, padded=padding_side(name)), batch_of(name, torch.float32, seed=3)]
    outliers_found = outliers(model, [{**batch, "labels": None} for batch in batches])
    assert outliers_found is not None
    assert model.training
    kurtosis, norms = [], []
    largest: dict[int, tuple[float, int, int | None]] = {}
    for batch in batches:
        with torch.no_grad():
            output = model.eval()(**batch, output_hidden_states=True)
        states = output.get("hidden_states") or output["decoder_hidden_states"]
        mask = batch.get("attention_mask" if "hidden_states" in output else "decoder_attention_mask")
        for row in range(len(states[0])):
            real = slice(None) if mask is None else mask[row].bool()
            samples = [state[row][real].numpy().astype(np.float64) for state in states[1:]]
            centred = [sample - sample.mean() for sample in samples]
            kurtosis.append([(each**4).mean() / (each.std(ddof=1) ** 4 + 1e-6) for each in centred])
            norms.append([np.abs(sample).max() for sample in samples])
            ids = batch.get("decoder_input_ids", batch.get("input_ids"))
            for layer, sample in enumerate(samples):
                place = int(np.abs(sample).max(1).argmax())
                token = None if ids is None else int(ids[row][real][place])
                largest[layer] = max(largest.get(layer, (0.0, -1, None)), (np.abs(sample).max(), place, token))
    assert outliers_found.kurtosis == pytest.approx(np.mean(kurtosis), rel=1e-4)
    assert outliers_found.max_inf_norm == pytest.approx(np.mean(norms, 0).max(), rel=1e-4)
    for each, (value, place, token) in zip(outliers_found.largest, largest.values(), strict=True):
        assert (each.place, each.token) == (place, token)
        assert each.value == pytest.approx(value, rel=1e-4)


def test_a_model_without_hidden_states_has_none() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, **_: Any) -> Any:
            return {}

    assert outliers(Bare(), [{"x": torch.ones(1)}]) is None
    with refused("there are no batches"):
        outliers(Bare(), [])
