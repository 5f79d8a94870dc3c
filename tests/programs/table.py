"""Programs that are recorded from a swapped model: each gives a function of a batch, from the model and an example.

A new program is one more entry of `PROGRAMS`; `test_programs.py` then tries every variant in it.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

Run = Callable[[Tensor, Tensor], Tensor]  # token ids (B,L) and the mask (B,L) to logits (B,L,V)


class Logits(nn.Module):
    """A model as a function of tensors alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
        return logits


class Cached(Logits):
    """As a caller that leaves `use_cache` alone: a decoder then makes a cache."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits: Tensor = self.model(input_ids=input_ids, attention_mask=attention_mask).logits
        return logits


def traced(model: nn.Module, *example: Tensor) -> Run:
    return torch.jit.trace(Logits(model), example, check_trace=False)  # type: ignore[no-any-return,no-untyped-call]  # torch's


def traced_with_a_cache(model: nn.Module, *example: Tensor) -> Run:
    return torch.jit.trace(Cached(model), example, check_trace=False)  # type: ignore[no-any-return,no-untyped-call]  # torch's


def _dynamic() -> tuple[dict[int, Any], dict[int, Any]]:
    return {1: torch.export.Dim.AUTO}, {1: torch.export.Dim.AUTO}  # type: ignore[attr-defined]  # torch's


def exported(model: nn.Module, *example: Tensor) -> Run:
    program = torch.export.export(Logits(model), example, dynamic_shapes=_dynamic(), strict=False)
    return program.module()  # type: ignore[return-value]  # a module that is called in the same way


def compiled(model: nn.Module, *example: Tensor) -> Run:
    torch.compiler.reset()
    counter = CompileCounter()
    whole = torch.compile(Logits(model), dynamic=True, fullgraph=True, backend=counter)
    whole(*example)

    def run(*batch: Tensor) -> Tensor:
        logits: Tensor = whole(*batch)
        assert counter.frame_count <= 2, "each length has a graph of its own"  # causal chunks have one for short texts
        return logits

    return run


def _onnx(model: nn.Module, example: tuple[Tensor, ...], **how: Any) -> Run:
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (the extra `tools`)")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed (the extra `tools`)")
    file, names = io.BytesIO(), ["input_ids", "attention_mask"]
    torch.onnx.export(Logits(model), example, file, input_names=names, output_names=["logits"], verbose=False, **how)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])

    def run(*batch: Tensor) -> Tensor:
        given = {name: tensor.numpy() for name, tensor in zip(names, batch, strict=True)}
        return torch.from_numpy(session.run(None, given)[0])

    return run


def onnx_exported(model: nn.Module, *example: Tensor) -> Run:
    return _onnx(model, example, dynamo=True, dynamic_shapes=_dynamic())


def onnx_traced(model: nn.Module, *example: Tensor) -> Run:
    axes = {name: {1: "length"} for name in ("input_ids", "attention_mask", "logits")}
    return _onnx(model, example, dynamo=False, opset_version=18, dynamic_axes=axes)


PROGRAMS: dict[str, Callable[..., Run]] = {
    program.__name__: program
    for program in (
        traced,
        traced_with_a_cache,
        exported,
        compiled,
        onnx_exported,
        onnx_traced,
    )
}
