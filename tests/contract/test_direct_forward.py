"""A program that calls `model.forward(...)`, as sentence-transformers does, passes by the hooks of the model itself."""

from __future__ import annotations

import pytest
import torch

from hf_attn_swap import list_variants, patch_model
from tests import zoo

WITH_ENCODER = ("albert", "bert", "opt")  # a part of these models calls all layers; in others it may be the model


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("variant", list_variants())
def test_forward_equals_call(family: str, variant: str) -> None:
    model = patch_model(zoo.build(family, torch.float64, head="base"), variant)
    batch = zoo.inputs(family, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(**batch).last_hidden_state
        try:
            found = model.forward(**batch).last_hidden_state
        except ValueError:
            assert variant == "modern_hopfield"
            assert family not in WITH_ENCODER
            with pytest.raises(ValueError, match=r"calls model\.forward\(\.\.\.\), call model\(\.\.\.\)"):
                model.forward(**batch)
            return
    assert torch.equal(found, wanted)
