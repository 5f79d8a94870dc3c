"""What a pass of a model costs in time and memory, beside another model on the same batches."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import torch
from torch import nn

from ..measuring.batches import Batch, evaluating, forward, without_labels

ROUNDS = 9


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a model costs.

    Attributes:
        milliseconds: the time of a pass of a batch, in the round of the median ratio.
        parameter_bytes: the bytes of the parameters; shared parameters count once.
        peak_bytes: the most memory that a pass of the largest batch takes above what was allocated before it, in
            bytes. CUDA only: torch does not count the memory of a CPU.
    """

    milliseconds: float
    parameter_bytes: int
    peak_bytes: int | None


def compare_costs(first: nn.Module, second: nn.Module, batches: Sequence[Batch]) -> tuple[list[Cost], float]:
    """What two models cost, and the time of the second as a multiple of the first's.

    The models take turns on the same batch, so that a drift of the machine affects both. The ratio is the median of
    the ratios of the rounds, and the times are those of the round that has this ratio: medians of the times alone come
    from different rounds, and their quotient is another number.

    Args:
        first: the model that the second is measured against.
        second: the other model.
        batches: dicts of tensors as the models take them; labels are left out.

    Raises:
        ValueError: there are no batches.
    """
    if not batches:
        raise ValueError("there are no batches to time.")
    unlabelled = [without_labels(batch) for batch in batches]
    models = (first, second)
    with evaluating(*models):
        times = _rounds(models, unlabelled)
        ratios = [b / a for a, b in zip(*times, strict=True)]
        middle = ratios.index(median_low(ratios))
        costs = [
            Cost(
                milliseconds=rounds[middle],
                parameter_bytes=sum(weight.numel() * weight.element_size() for weight in model.parameters()),
                peak_bytes=_peak(model, max(unlabelled, key=_elements)),
            )
            for model, rounds in zip(models, times, strict=True)
        ]
    return costs, ratios[middle]


def _rounds(models: Sequence[nn.Module], batches: Sequence[Batch]) -> list[list[float]]:
    """The milliseconds of each model in each round. The first round warms up and is left out."""
    times: list[list[float]] = [[] for _ in models]
    for turn in range(ROUNDS + 1):
        batch = batches[max(0, turn - 1) % len(batches)]
        places = range(len(models)) if turn % 2 else reversed(range(len(models)))  # neither is always the first
        for place in places:
            start = _now(models[place])
            forward(models[place], batch)
            times[place].append(1e3 * (_now(models[place]) - start))
    return [rounds[1:] for rounds in times]


def _now(model: nn.Module) -> float:
    """The time in seconds, after the device has done its work."""
    device = next(model.parameters()).device
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _peak(model: nn.Module, batch: Batch) -> int | None:
    """The most memory in bytes that a pass adds; None where it is not counted."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    forward(model, batch)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def _elements(batch: Batch) -> int:
    """The number of values in a batch."""
    return sum(value.numel() for value in batch.values() if isinstance(value, torch.Tensor))
