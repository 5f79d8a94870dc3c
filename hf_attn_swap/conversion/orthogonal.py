"""Makes orthogonal matrices that spread one large channel over all channels. Axes: C channel."""

from __future__ import annotations

import torch
from torch import Tensor


def spreading(channels: int, generator: torch.Generator) -> Tensor:
    """Random signs times (random orthogonal of the odd part, Kronecker product Hadamard of the power of two), (C,C).

    For a power of two this is the randomised Hadamard matrix of QuaRot (Ashkboos et al., 2024, section 3). The rows of
    a matrix x (N,C) are rotated by x Q. In float64.
    """
    power = channels & -channels
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while len(hadamard) < power:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    signs = torch.randint(0, 2, (channels, 1), generator=generator, dtype=torch.float64) * 2 - 1
    odd = random(channels // power, generator)
    return signs * torch.kron(odd.contiguous(), hadamard / power**0.5)


def mean_keeping(channels: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix Q (C,C) with Q 1 = 1, so that x Q has the mean of x. In float64.

    It turns the space of the vectors with mean 0, and leaves the vector of ones as it is.
    """
    basis, _ = torch.linalg.qr(
        torch.cat([torch.ones(channels, 1, dtype=torch.float64), _normal(channels, channels - 1, generator)], 1)
    )
    within = basis[:, 1:]  # with mean 0
    turned: Tensor = within @ random(channels - 1, generator) @ within.T
    return turned + 1 / channels


def random(channels: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix (C,C), uniform over the group. In float64."""
    matrix, triangle = torch.linalg.qr(_normal(channels, channels, generator))
    uniform: Tensor = matrix * triangle.diagonal().sign()  # QR alone is not uniform
    return uniform


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)
