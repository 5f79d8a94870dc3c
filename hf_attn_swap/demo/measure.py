"""Figures of one model that `training` has not: an interval of a share, outliers of the layer outputs, time per batch.

kurtosis = mean over samples, then layers, of mean((a − μ)⁴) / (s⁴ + 1e-6), s the unbiased deviation (normal: 3);
max infinity norm = maximum over layers of the mean over samples of max|a|. Padding is left out of both.
Definitions of OutEffHop (Hu et al., 2024), section 4; Wilson (1927) for the interval of a share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from statistics import NormalDist, median

import torch
from datasets import Dataset
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Trainer

from ..analysis import metrics

Z_95 = NormalDist().inv_cdf(0.975)
Batch = dict[str, Tensor]


def wilson_interval(successes: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share. It covers the sampling of the test sentences, and nothing else."""
    share, z2 = successes / total, Z_95**2 / total
    centre = (share + z2 / 2) / (1 + z2)
    half = Z_95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total)) / (1 + z2)
    return centre - half, centre + half


@torch.no_grad()
def outliers(trainer: Trainer, test: Dataset) -> dict[str, float]:
    """Kurtosis and largest infinity norm of every layer's output on the held-out sentences."""
    assert isinstance(trainer.model, nn.Module)
    trainer.model.eval()
    kurtosis: list[Tensor] = []
    norms: list[Tensor] = []
    for batch in trainer.get_test_dataloader(test):
        inputs = {key: tensor.to(trainer.args.device) for key, tensor in batch.items()}
        layers = trainer.model(**inputs, output_hidden_states=True).hidden_states[1:]  # the first is the embeddings
        real = inputs["attention_mask"].bool()
        kurtosis.append(torch.stack([metrics.kurtosis(states, real) for states in layers], -1))
        norms.append(torch.stack([metrics.max_infinity_norm(states, real) for states in layers], -1))
    return {"kurtosis": float(torch.cat(kurtosis).mean()), "max_inf_norm": float(torch.cat(norms).mean(0).max())}


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
