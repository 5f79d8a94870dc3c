"""Makes orthogonal matrices that spread one large channel over all channels. Axes: C channel."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor


def spreading(channels: int, generator: torch.Generator) -> Tensor:
    """Random signs times a Hadamard matrix, all of whose entries have one size, (C,C): x (N,C) is rotated by x Q.

    QuaRot (Ashkboos et al., 2024, section 3). Where no Hadamard matrix is found, the odd part of C gets a random
    orthogonal matrix, and the power of two a Hadamard matrix; the Kronecker product of both is taken. In float64.
    """
    power = channels & -channels
    found = next((each for each in map(hadamard, _parts(channels)) if each is not None), None)
    if found is None:
        found = random(channels // power, generator)
    rest = sylvester(channels // len(found))
    signs = torch.randint(0, 2, (channels, 1), generator=generator, dtype=torch.float64) * 2 - 1
    return signs * torch.kron(found.contiguous(), rest)


def _parts(channels: int) -> Iterator[int]:
    """The odd part of C times 1, 2, 4 and so on, up to C."""
    part = channels // (channels & -channels)
    while part <= channels:
        yield part
        part *= 2


def sylvester(order: int) -> Tensor:
    """The Hadamard matrix of a power of two, with entries of size 1 / sqrt(order)."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    scaled: Tensor = matrix / order**0.5
    return scaled


def hadamard(order: int) -> Tensor | None:
    """A Hadamard matrix by one of Paley's two constructions (1933), with entries of size 1 / sqrt(order), or None.

    They exist for an order q + 1 with a prime q = 3 mod 4, and 2 (q + 1) with a prime q = 1 mod 4.
    """
    matrix: Tensor | None = None
    if order == 1:
        matrix = torch.ones(1, 1, dtype=torch.float64)
    elif order % 4 == 0 and _is_prime(order - 1):
        matrix = _conference(order - 1, -1.0) + torch.eye(order, dtype=torch.float64)
    elif order % 8 == 4 and _is_prime(order // 2 - 1):
        pairs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
        other = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
        one = torch.eye(order // 2, dtype=torch.float64)
        matrix = torch.kron(_conference(order // 2 - 1, 1.0), pairs) + torch.kron(one, other)
    return None if matrix is None else matrix / order**0.5


def _conference(prime: int, sign: float) -> Tensor:
    """A matrix (q+1,q+1) of zeros on the diagonal and ones and minus ones, orthogonal but for its size.

    Entry (i,j) of its core is 1 if i - j is a square mod q, and otherwise -1.
    """
    squares = torch.zeros(prime, dtype=torch.bool)
    squares[torch.arange(1, prime).square() % prime] = True
    character = squares.double() * 2 - 1
    character[0] = 0
    numbers = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1.0, sign
    matrix[1:, 1:] = character[(numbers[:, None] - numbers) % prime]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


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
    """A random orthogonal matrix (C,C), in float64."""
    matrix: Tensor = torch.linalg.qr(_normal(channels, channels, generator)).Q
    return matrix


def _normal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=generator, dtype=torch.float64)
