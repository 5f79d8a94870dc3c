"""`from_pretrained(device_map="auto", max_memory=...)`: accelerate leaves a part of a converted checkpoint on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

from hf_attn_swap import describe, list_variants
from tests import zoo
from tests.contract.harness import distance, forward, padding_side, perturb, swaps

pytestmark = pytest.mark.slow
AUTO = {"bert": AutoModelForMaskedLM, "llama": AutoModelForCausalLM}


def half_on_disk(folder: Path, auto: Any, whole: Any, where: Path) -> Any:
    """The checkpoint with a device map that accelerate works out for half of the memory that the model needs."""
    bytes_needed = sum(each.numel() * each.element_size() for each in whole.state_dict().values())
    return auto.from_pretrained(
        folder, device_map="auto", max_memory={"cpu": bytes_needed // 2}, offload_folder=str(where)
    ).eval()


@pytest.mark.parametrize("family", AUTO)
@pytest.mark.parametrize("variant", list_variants())
def test_equal_outputs(family: str, variant: str, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint(family, variant, num_hidden_layers=6)
    whole = perturb(AUTO[family].from_pretrained(folder)).eval()
    whole.save_pretrained(folder)
    model = half_on_disk(folder, AUTO[family], whole, tmp_path / "offload")
    waiting = [name for name, each in model.named_parameters() if each.is_meta]
    assert any(".self" in name for name in waiting), "no attention waits on disk"
    assert len(waiting) < len(list(model.parameters()))
    assert str(describe(model)) == str(describe(whole))
    assert len(swaps(model)) == 6
    batch = zoo.inputs(family, padded=padding_side(family))
    assert distance(forward(model, batch), forward(whole, batch)) <= 1e-6
    if family in zoo.CAUSAL:
        asked: dict[str, Any] = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False)
        assert torch.equal(model.generate(**batch, **asked), whole.generate(**batch, **asked))
