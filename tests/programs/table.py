"""The programs that run a swapped model: each gives a function of a batch, from the model and an example batch.

A new program is one more entry of `PROGRAMS`; `test_programs.py` then tries every variant in it.
"""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from tests.harness.adapters import lora

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


def padded(model: nn.Module, *example: Tensor) -> Run:
    """Each row alone, without its padding: the wanted logits come from the padded batch."""

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        logits = []
        for row, real in zip(ids, mask.bool(), strict=True):
            alone = Logits(model)(row[real][None], torch.ones_like(row[real][None]))[0]
            logits.append(alone.new_zeros(len(row), alone.shape[1]).masked_scatter_(real[:, None], alone))
        return torch.stack(logits)

    return run


def in_steps(model: nn.Module, *example: Tensor) -> Run:
    """A decoder reads the example's length, then some tokens one by one with its cache, and then all others."""
    start = example[0].shape[1]

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        out = model(input_ids=ids[:, :start], attention_mask=mask[:, :start], use_cache=True)
        logits = [out.logits]
        ends = (start, *range(start + 1, start + 6), ids.shape[1])
        for first, end in itertools.pairwise(ends):
            cache = out.past_key_values
            out = model(ids[:, first:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
            logits.append(out.logits)
        return torch.cat(logits, 1)

    return run


def adapted(model: nn.Module, *example: Tensor) -> Run:
    """An adapter of PEFT that changes nothing."""
    name: str = model.config.model_type  # type: ignore[union-attr,assignment]  # a transformers model
    return Logits(peft.get_peft_model(copy.deepcopy(model), lora(name)).eval())  # type: ignore[arg-type]  # as above


def called_around(model: nn.Module, *example: Tensor) -> Run:
    """`model.forward(...)`, which passes by the hooks of the model, as sentence-transformers calls it."""

    def run(ids: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = model.forward(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return logits

    return run


PROGRAMS: dict[str, Callable[..., Run]] = {
    program.__name__: program
    for program in (
        traced,
        traced_with_a_cache,
        exported,
        compiled,
        onnx_exported,
        onnx_traced,
        padded,
        in_steps,
        adapted,
        called_around,
    )
}
