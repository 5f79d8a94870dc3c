"""Every head that transformers has for a family: a tiny model, its arguments and its outputs."""

from __future__ import annotations

from typing import Any

import torch

from tests import zoo
from tests.contract.cells import FAMILY_NAMES
from tests.contract.harness import batch_of, fresh
from tests.lifecycle.steps import heads, tensors

CASES = [(name, auto) for name in FAMILY_NAMES for auto in heads(fresh(name).config)]


def build(name: str, auto: str) -> Any:
    """A head on the family's own weights."""
    source = fresh(name, torch.float32)
    torch.manual_seed(0)
    model: Any = heads(source.config)[auto](source.config).eval()
    model.base_model.load_state_dict(source.base_model.state_dict(), strict=False)
    return model


def arguments(name: str, auto: str) -> dict[str, Any]:
    batch = batch_of(name, torch.float32, padded="right" if "input_ids" in zoo.inputs(name) else None)
    if auto == "AutoModelForMultipleChoice":
        return {key: torch.stack([value, value.flip(0)], 1) for key, value in batch.items()}
    return batch


def outputs(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    with torch.no_grad():
        return list(tensors(model(**batch, output_hidden_states=True)))
