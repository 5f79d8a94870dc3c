"""transformers' own time-series models: exact, or refused when they are patched, with the true reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_attn_swap import patch_model

from .tiny import registry
from .walk import EXACT, PART, REFUSED, compare, find

RESULTS = {
    "patchtst": (EXACT, PART),
    "patchtsmixer": (EXACT, PART),
    "timesfm": (EXACT, PART),
    "timesfm2_5": (EXACT, EXACT),
    "informer": (EXACT, PART),
    "autoformer": (REFUSED, REFUSED),
    "time_series_transformer": (EXACT, EXACT),
}
SMALL = dict(prediction_length=4, context_length=16, d_model=32, encoder_layers=3, decoder_layers=2, lags_sequence=[1])


@pytest.mark.parametrize("model_type", RESULTS)
def test_each_is_exact_or_refused(model_type: str) -> None:
    if model_type not in registry():
        pytest.skip(f"this transformers has no {model_type}")
    stock = find(model_type)
    assert not stock.unfed
    outcomes = [compare(stock, variant) for variant in ("belief", "modern_hopfield")]
    assert tuple(outcome.result for outcome in outcomes) == RESULTS[model_type], outcomes
    assert all(outcome.run == outcome.modules for outcome in outcomes)


def built(model_type: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(model_type, **changes)).eval()


def test_sparse_attention_of_its_own_code_is_named() -> None:
    """Informer as it starts: its self-attention is ProbSparse, and only its cross-attention asks for a function."""
    with pytest.raises(ValueError, match=r"cross-attention.*InformerProbSparseAttention"):
        patch_model(built("informer", **SMALL), "belief")


def test_a_sequence_that_is_shortened_carries_no_scores() -> None:
    """Informer's distilling halves the sequence behind each layer of the encoder but the last."""
    with pytest.raises(ValueError, match="InformerEncoder shortens the sequence between its layers"):
        patch_model(built("informer", attention_type="full", **SMALL), "modern_hopfield")
    patch_model(built("informer", attention_type="full", **SMALL), "modern_hopfield", modules="decoder")
    patch_model(built("informer", attention_type="full", distil=False, **SMALL), "modern_hopfield")


def test_a_mixer_has_attention_only_where_it_is_switched_on() -> None:
    assert not CONFIG_MAPPING["patchtsmixer"]().self_attn
    sizes = dict(context_length=16, patch_length=4, patch_stride=4, d_model=8, num_layers=2)
    with pytest.raises(ValueError, match="no attention module goes through"):
        patch_model(built("patchtsmixer", **sizes), "belief")
    patch_model(built("patchtsmixer", self_attn=True, **sizes), "belief")
