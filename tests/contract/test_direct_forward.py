"""A program that calls `model.forward(...)`, as sentence-transformers does, passes by the hooks of the model itself."""

from __future__ import annotations

import pytest
import torch

from hf_attn_swap import patch_model
from tests import zoo

from .cells import WIDE, Cell, over

WITH_ENCODER = ("albert", "bert", "opt")  # a part of these models calls all layers; in others it may be the model


@over(WIDE)
def test_forward_equals_call(family: str, cell: Cell) -> None:
    model = patch_model(zoo.build(family, torch.float64, head="base"), cell[0])
    batch = zoo.inputs(family, dtype=torch.float64)
    with torch.no_grad():
        wanted = model(**batch).last_hidden_state
        try:
            found = model.forward(**batch).last_hidden_state
        except ValueError:
            assert "modern_hopfield" in cell[0]
            assert family not in WITH_ENCODER
            with pytest.raises(ValueError, match=r"calls model\.forward\(\.\.\.\), call model\(\.\.\.\)"):
                model.forward(**batch)
            return
    assert torch.equal(found, wanted)
