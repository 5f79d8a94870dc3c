"""Finds inputs that reach the attention of a model, and runs the model on them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .feed import Batch, guesses
from .tiny import NotBuiltError, one_line


@dataclass
class Probe:
    """One call: of the whole model (path "") or of a part that the whole model's inputs do not reach.

    Attributes:
        path: of the part.
        batch: its arguments.
        reached: the paths of the wanted modules that run, from the whole model.
    """

    path: str
    batch: Batch
    reached: list[str]


@dataclass(frozen=True)
class Seen:
    """What one call gave.

    Attributes:
        outside: the tensors of the output, at real positions.
        inside: what the attention modules themselves gave: a model that rounds to codes may hide a change.
    """

    outside: list[Tensor]
    inside: list[Tensor]


def find_probes(model: PreTrainedModel, wanted: set[str]) -> list[Probe]:
    """Calls that reach as many of these modules as we find inputs for.

    Raises:
        NotBuiltError: none could be made, or none reaches any of them.
    """
    missing, probes, reasons = set(wanted), [], []
    parts = {name: part for name, part in model.named_modules() if isinstance(part, PreTrainedModel)}
    for path, part in parts.items():
        inside = {each for each in missing if not path or each.startswith(f"{path}.")}
        if not inside:
            continue
        batch, reached, reason = _feed(part, path, inside)
        reasons.append(reason)
        if batch is not None and reached:
            probes.append(Probe(path, batch, sorted(reached)))
            missing -= reached
    if not probes:
        raise NotBuiltError(f"no inputs found: {next((each for each in reasons if each), 'no module was reached')}")
    return probes


def _feed(part: PreTrainedModel, path: str, wanted: set[str]) -> tuple[Batch | None, set[str], str]:
    """The first guess that runs and reaches any wanted module, what it reaches, and why the first guess failed."""
    reached: set[str] = set()
    handles = [
        part.get_submodule(name.removeprefix(f"{path}.") if path else name).register_forward_hook(
            lambda module, args, output, name=name: reached.add(name)
        )
        for name in wanted
    ]
    reasons: list[str] = []
    try:
        for batch in guesses(part):
            reached.clear()
            try:
                if any(not torch.isfinite(each).all() for each in _call(part, batch)):
                    reasons.append("the stock model's numbers are not finite")
                    continue
            except Exception as failure:  # noqa: BLE001  # the next guess; the reason is kept
                reasons.append(f"{type(failure).__name__}: {one_line(failure)}")
                continue
            if reached:
                return batch, set(reached), ""
    finally:
        for handle in handles:
            handle.remove()
    return None, set(), reasons[0] if reasons else ""


def run(model: nn.Module, probe: Probe) -> list[Tensor]:
    """The tensors that this call gives, at real positions."""
    return _call(model.get_submodule(probe.path), probe.batch)


def run_and_watch(model: nn.Module, probe: Probe) -> Seen:
    """The tensors that this call gives, and those that the attention modules give inside."""
    inside: list[Tensor] = []
    with contextlib.ExitStack() as stack:
        for path in probe.reached:
            module = model.get_submodule(path)
            handle = module.register_forward_hook(lambda module, args, output: inside.extend(tensors(output)))
            stack.callback(handle.remove)
        return Seen(run(model, probe), inside)


def _call(model: nn.Module, batch: Batch) -> list[Tensor]:
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in batch.items()}
        outputs = list(tensors(model(**given)))
    mask = batch.get("attention_mask")
    return [
        tensor[mask.bool()] if mask is not None and tensor.shape[:2] == mask.shape else tensor for tensor in outputs
    ]


def tensors(output: Any) -> Iterator[Tensor]:
    """Every tensor of numbers in an output, however it is nested.

    Attention weights are left out: nobody asked for them, and eager models give them all the same.
    """
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output.detach()
    elif isinstance(output, dict):
        for name, value in output.items():
            if "attentions" not in name:
                yield from tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from tensors(value)


def distance(got: list[Tensor], wanted: list[Tensor]) -> float:
    """Largest difference of any output, relative to that output's largest entry."""
    if [tensor.shape for tensor in got] != [tensor.shape for tensor in wanted]:
        return math.inf
    pairs = [(a, b) for a, b in zip(got, wanted, strict=True) if b.numel()]
    return max((float((a - b).abs().max() / b.abs().max().clamp_min(1e-3)) for a, b in pairs), default=0.0)


def same_bits(got: list[Tensor], wanted: list[Tensor]) -> bool:
    """True if both hold the same numbers, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def in_double(batch: Batch) -> Batch:
    """The same arguments with fp64 instead of fp32."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }
