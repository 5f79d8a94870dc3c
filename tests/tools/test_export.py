"""`torch.export` with a dynamic length, and ONNX from it: every variant equals the model as it is, at two lengths."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_attn_swap import list_variants, patch_model
from tests import zoo
from tests.contract.cells import DEEP
from tests.contract.harness import TOLERANCE, distance, padding_side, perturb

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # warnings of the exporters
LENGTHS = (7, 12)  # the model is exported at the first
Batch = tuple[Tensor, Tensor]


class Logits(nn.Module):
    """A model as a function of tensors alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        cache = {"use_cache": False} if type(self.model).__name__.endswith("CausalLM") else {}
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, **cache).logits
        return logits


def batch_of(family: str, length: int) -> Batch:
    made = zoo.inputs(family, length=length, padded=padding_side(family))
    return made["input_ids"], made["attention_mask"]


def swapped(family: str, variant: str) -> Logits:
    return Logits(perturb(patch_model(zoo.build(family, num_hidden_layers=2), variant))).eval()


def arguments(family: str) -> dict[str, Any]:
    """Both inputs have the same length, from 2 to 60."""
    length = torch.export.Dim("length", min=2, max=60)
    return {"args": batch_of(family, LENGTHS[0]), "dynamic_shapes": ({1: length}, {1: length})}


def real(logits: Tensor, batch: Batch) -> Tensor:
    return logits[batch[1].bool()]


@pytest.mark.parametrize("family", DEEP)
@pytest.mark.parametrize("variant", list_variants())
@torch.no_grad()
def test_exported_program(family: str, variant: str) -> None:
    model = swapped(family, variant)
    exported = torch.export.export(model, **arguments(family), strict=False).module()
    for length in LENGTHS:
        batch = batch_of(family, length)
        assert distance(real(exported(*batch), batch), real(model(*batch), batch)) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("family", DEEP)
@pytest.mark.parametrize("variant", list_variants())
@torch.no_grad()
def test_onnx(family: str, variant: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (the extra `tools`)")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (the extra `tools`)")
    model = swapped(family, variant)
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(model, **arguments(family), dynamo=True, verbose=False).save(tmp_path / "model.onnx")  # type: ignore[union-attr]  # dynamo gives a program
    session = runtime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    for length in LENGTHS:
        batch = batch_of(family, length)
        given = {into.name: tensor.numpy() for into, tensor in zip(session.get_inputs(), batch, strict=True)}
        found = torch.from_numpy(session.run(None, given)[0])
        assert distance(real(found, batch), real(model(*batch), batch)) <= TOLERANCE[torch.float32]
