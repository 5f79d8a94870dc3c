"""Measures one model: held-out accuracy with its interval, outliers of the layers' outputs, time per batch.

kurtosis = mean over samples, then layers, of mean((a − μ)⁴) / (s⁴ + 1e-6), s the unbiased deviation (normal: 3);
max infinity norm = maximum over layers of the mean over samples of max|a|. Padding is left out of both.
Definitions of OutEffHop (Hu et al., 2024), section 4; Wilson (1927) for the interval of a share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, median

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from ..analysis import metrics

Z_95 = NormalDist().inv_cdf(0.975)
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Scores:
    """The measurements of one model on the held-out sentences."""

    correct: list[bool]
    kurtosis: float
    max_inf_norm: float

    @property
    def accuracy(self) -> float:
        """The share of sentences whose class was predicted correctly."""
        return sum(self.correct) / len(self.correct)


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share. It covers the sampling of the test sentences, and nothing else."""
    share, z2 = successes / total, Z_95**2 / total
    centre = (share + z2 / 2) / (1 + z2)
    half = Z_95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total)) / (1 + z2)
    return centre - half, centre + half


def paired_difference(correct: Sequence[bool], control: Sequence[bool]) -> tuple[float, float]:
    """The difference in accuracy on the same sentences, and half the width of its 95 % interval."""
    differences = [int(a) - int(b) for a, b in zip(correct, control, strict=True)]
    total = len(differences)
    mean = sum(differences) / total
    variance = sum((d - mean) ** 2 for d in differences) / max(total - 1, 1)
    return mean, Z_95 * math.sqrt(variance / total)


def sample_kurtosis(activation: Tensor) -> float:
    """The kurtosis (not the excess kurtosis) of one sample's flattened activations, in fp32."""
    return float(metrics.kurtosis(activation.reshape(1, -1, 1)))


@torch.no_grad()
def evaluate(model: nn.Module, batches: Sequence[Batch], name: str) -> Scores:
    """Classify the held-out batches, and measure the output of every layer in the same passes."""
    model.eval()
    correct: list[bool] = []
    kurtosis: list[list[float]] = []
    norms: list[list[float]] = []
    for batch in tqdm(batches, desc=f"{name}: test", unit="batch", leave=False):
        outputs = model(**batch, output_hidden_states=True)
        correct += (outputs.logits.argmax(-1) == batch["labels"]).tolist()
        for row, mask in enumerate(batch["attention_mask"].bool()):
            layers = outputs.hidden_states[1:]  # the first hidden state is the embeddings
            tokens = [state[row][mask] for state in layers]
            kurtosis.append([sample_kurtosis(state) for state in tokens])
            norms.append([float(state.abs().max()) for state in tokens])
    return Scores(
        correct=correct,
        kurtosis=float(torch.tensor(kurtosis).mean()),
        max_inf_norm=float(torch.tensor(norms).mean(0).max()),
    )


def train_step_ms(models: Mapping[str, nn.Module], batch: Batch, rounds: int = 9) -> dict[str, list[float]]:
    """Milliseconds of forward and backward on one batch.

    The models take turns, so that a drift of the machine affects all models equally.
    """
    times: dict[str, list[float]] = {name: [] for name in models}
    for turn in tqdm(range(rounds + 1), desc="timing", unit="round", leave=False):
        for name, model in models.items():
            model.train()
            model.zero_grad()
            start = _now(batch)
            model(**batch).loss.backward()
            if turn:  # the first round warms up and does not count
                times[name].append(1e3 * (_now(batch) - start))
    return times


def ratio(times: Sequence[float], control: Sequence[float]) -> float:
    """The median of the ratios of the two times of each round."""
    return median(a / b for a, b in zip(times, control, strict=True))


def _now(batch: Batch) -> float:
    if batch["input_ids"].device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()
