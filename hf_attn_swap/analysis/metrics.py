"""Diagnostics of activations, attention weights and updates, as pure functions.

kurtosis = mean((a - mu)^4) / (s^4 + 1e-6) per sample, s unbiased, not excess; max infinity norm = max |a| per sample;
token similarity = mean cosine over pairs i < j; entropy = -sum p ln p per row; residual ratio = ||X - mean|| / ||X||
with ||A|| = sqrt(max column sum x max row sum of |a|). All are computed in fp32 at least, without padding.
OutEffHop, section 4 and its published code (1e-6 is its constant); modern Hopfield attention, section 5; BeliefFormer,
figure 3; residual ratio: Dong et al. 2021. Axes: B batch, T token, E feature, H head, Q query, K key.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

EPSILON = 1e-6
ROWS = 256  # tokens whose cosines with all others are held at a time


def kurtosis(activation_BTE: Tensor, real_BT: Tensor | None = None) -> Tensor:
    """(B,): kurtosis of each sample's real activations, flattened; 3 for a normal distribution.

    Raises:
        ValueError: a sample has fewer than two values.
    """
    return torch.stack([_kurtosis(sample) for sample in _samples(activation_BTE, real_BT)])


def _kurtosis(sample: Tensor) -> Tensor:
    if sample.numel() < 2:
        raise ValueError("kurtosis needs at least two values in every sample; leave empty rows out.")
    flat = sample.flatten()
    return (flat - flat.mean()).pow(4).mean() / (flat.std().pow(4) + EPSILON)


def max_inf_norm(activation_BTE: Tensor, real_BT: Tensor | None = None) -> Tensor:
    """(B,): largest absolute value of each sample's real activations.

    Raises:
        ValueError: a sample has no real token.
    """
    samples = _samples(activation_BTE, real_BT)
    if any(sample.numel() == 0 for sample in samples):
        raise ValueError("a row without a real token has no largest value; leave empty rows out.")
    return torch.stack([sample.abs().max() for sample in samples])


def token_similarity(states_BTE: Tensor, real_BT: Tensor | None = None) -> Tensor:
    """(B,): mean cosine over the pairs i < j of a sample's real tokens; NaN for a single token."""
    return torch.stack([_similarity(sample) for sample in _samples(states_BTE, real_BT)])


def _similarity(sample_TE: Tensor) -> Tensor:
    unit = torch.nn.functional.normalize(sample_TE, dim=-1)
    count = len(unit)
    pairs = unit.sum(0).square().sum() - unit.square().sum()  # the sum over i != j without the T x T matrix
    return pairs / (count * (count - 1)) if count > 1 else pairs.new_tensor(float("nan"))


def pair_cosines(states_BTE: Tensor, real_BT: Tensor | None = None) -> Iterator[Tensor]:
    """The cosines (P,) of the pairs i < j of a sample's real tokens, a block of pairs at a time."""
    for sample in _samples(states_BTE, real_BT):
        unit = torch.nn.functional.normalize(sample, dim=-1)
        for start in range(0, len(unit), ROWS):
            block = unit[start : start + ROWS] @ unit[start:].T
            yield block[torch.ones_like(block, dtype=torch.bool).triu(1)]


def attention_entropy(weights_BHQK: Tensor) -> Tensor:
    """(B,H,Q): -sum p ln p of each row; 0 for a row on one key, ln K for an even one.

    Weights are taken as they are: rows of softmax_1 or of clipped softmax need not sum to 1. Weights of
    `simpletron*` can be negative and have no entropy: NaN.
    """
    wide = _wide(weights_BHQK)
    entropy: Tensor = torch.special.entr(wide).sum(-1)
    return entropy.masked_fill((wide < 0).any(-1), float("nan"))


def sink_mass(weights_BHQK: Tensor, sinks_BK: Tensor) -> Tensor:
    """(B,H,Q): the part of each row's weight on the sink keys (first token, separators); NaN for a row of zeros."""
    wide = _wide(weights_BHQK).abs()
    return (wide * sinks_BK[:, None, None].to(wide)).sum(-1) / wide.sum(-1)


def residual_ratio(states_BTE: Tensor, real_BT: Tensor | None = None) -> Tensor:
    """(B,): how much a sample's tokens differ. 0 means that all tokens are equal (rank collapse). It may exceed 1."""
    samples = _samples(states_BTE, real_BT)
    return torch.stack([_norm(sample - sample.mean(0)) / _norm(sample) for sample in samples])


def _norm(matrix_TE: Tensor) -> Tensor:
    size = matrix_TE.abs()
    return (size.sum(0).max() * size.sum(1).max()).sqrt()


def update_geometry(x_BTE: Tensor, update_BTE: Tensor, real_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The norm of the update of each real token, and the angle of the update with the layer's input, in radians.

    Returns:
        Two tensors (N,), in the order of the mask's real tokens. The angle of a zero vector is NaN.
    """
    x, update = (torch.cat(_samples(states_BTE, real_BT)) for states_BTE in (x_BTE, update_BTE))
    norm = update.norm(dim=-1)
    cosine = (x * update).sum(-1) / (x.norm(dim=-1) * norm)
    return norm, cosine.clamp(-1, 1).acos()


def _samples(states_BTE: Tensor, real_BT: Tensor | None) -> list[Tensor]:
    """The real tokens of each sample: (T_b,E)."""
    wide = _wide(states_BTE)
    if real_BT is None:
        return list(wide)
    if real_BT.shape != states_BTE.shape[:2]:
        raise ValueError(f"the mask {tuple(real_BT.shape)} does not fit activations {tuple(states_BTE.shape)}.")
    return [sample[real] for sample, real in zip(wide, real_BT.bool(), strict=True)]


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
