"""Rotates the residual stream of a pretrained decoder, so that no channel is much larger than the others.

Let the stream be x (a row), and Q an orthogonal matrix. What writes x writes x Q instead, what reads x reads x Q and
multiplies by Q^T first, and all of this lies in the weights: W Q for an embedding, Q^T W for an output projection, and
W diag(g) Q for a matrix behind an RMSNorm with the weight g, which becomes 1. The norm without its weight commutes with
Q. The model is the same function, and a channel that was a thousand times the others is spread over all.

QuaRot (Ashkboos et al., 2024), section 4, stage 1a and 1c; SliceGPT (Ashkboos et al., 2024), section 3, for folded
norms. docs/mathematics.md, section Rotated stream. Axes: C channel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from hf_attn_swap.measuring.batches import as_batches, evaluating, forward
from hf_attn_swap.wiring.install import installation_of

KINDS = ("llama", "mistral", "qwen2", "qwen3")  # decoders with RMSNorm before each part, and these modules
BATCHES = 4  # that are compared
ROUNDING = {torch.float32: 1e-4, torch.float64: 1e-6}  # norms compute in fp32 also in a model in fp64
ROWS = 4096  # of a weight that are rotated at once


@torch.no_grad()
def rotate(model: Any, batches: Iterable[Any], *, seed: int = 0) -> float:
    """Rotate the residual stream of a stock model, and the values of each head, in place; the same function.

    A head that shares its matrix with the embedding gets its own (`config.tie_word_embeddings` is then False). The
    result is an ordinary model of the same class, which plain transformers saves and loads. Rotate first, then patch,
    convert or quantise. There is no way back.

    Args:
        model: a stock causal language model of one of `KINDS`, in float32 or float64.
        batches: a few dicts of tensors as the model takes them; the outputs of the first four are compared.
        seed: of the random signs.

    Returns:
        The largest relative difference of the outputs, |after - before| / |before|.

    Raises:
        ValueError: the model is of another kind, patched, or in half precision.
        RuntimeError: the outputs differ by more than rounding.
    """
    if model.config.model_type not in KINDS or installation_of(model) is not None or model.dtype not in ROUNDING:
        raise ValueError(f"rotate takes stock models of {', '.join(KINDS)} in float32, before they are patched.")
    rows = list(itertools.islice(as_batches(batches), BATCHES))
    with evaluating(model):
        before = [forward(model, row).logits for row in rows]
        _rotate(model, seed)
        after = [forward(model, row).logits for row in rows]
    error = max(float((new - old).norm() / old.norm()) for new, old in zip(after, before, strict=True))
    if not error <= ROUNDING[model.dtype]:
        raise RuntimeError(f"the outputs of the rotated model differ by {error:.1e} of their size; load it again.")
    return error


def _rotate(model: Any, seed: int) -> None:
    """Give all weights around the stream their rotated numbers."""
    base, head = model.model, model.lm_head
    if head.weight is base.embed_tokens.weight:
        head.weight = nn.Parameter(head.weight.detach().clone())
        model.config.tie_word_embeddings = False
    stream_CC, head_CC = (
        spreading(width, torch.Generator().manual_seed(seed))
        for width in (model.config.hidden_size, base.layers[0].self_attn.head_dim)
    )
    turn(base.embed_tokens.weight, 1, stream_CC)
    for layer in base.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for parameter in attention.v_proj.parameters():
            turn(parameter, 0, head_CC)
        turn(attention.o_proj.weight, 1, head_CC)
        for writer in (attention.o_proj, mlp.down_proj):
            for parameter in writer.parameters():
                turn(parameter, 0, stream_CC)
        fold(layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj), stream_CC)
        fold(layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), stream_CC)
    fold(base.norm, (head,), stream_CC)


def fold(norm: Any, readers: Iterable[nn.Linear], rotation_CC: Tensor) -> None:
    """Rotate the matrices behind a norm, and put its weight into them."""
    for reader in readers:
        turn(reader.weight, 1, rotation_CC, norm.weight)
    norm.weight.fill_(1)


def turn(weight: Tensor, axis: int, rotation_CC: Tensor, scale_C: Tensor | None = None) -> None:
    """Multiply the channels along an axis by a scale, and rotate them; by a smaller matrix, each block of them.

    Computed in float64.
    """
    moved = weight.movedim(axis, -1)
    turned = []
    for some in torch.split(moved.reshape(-1, moved.shape[-1]), ROWS):
        wide = some.double() if scale_C is None else some.double() * scale_C.double()
        blocks = wide.reshape(len(wide), -1, len(rotation_CC))
        turned.append((blocks @ rotation_CC.to(weight.device)).flatten(1).to(weight.dtype))
    moved.copy_(torch.cat(turned).view(moved.shape))


def spreading(channels: int, generator: torch.Generator) -> Tensor:
    """Random signs times a Hadamard matrix, all of whose entries have one size, (C,C): x (N,C) is rotated by x Q.

    QuaRot (Ashkboos et al., 2024, section 3). Where no Hadamard matrix is found, the odd part of C gets a random
    orthogonal matrix, and the power of two a Hadamard matrix; the Kronecker product of both is taken. In float64.
    """
    power = channels & -channels
    sizes = (channels // power * 2**step for step in range(power.bit_length()))
    factor = next((matrix for matrix in map(hadamard, sizes) if matrix is not None), None)
    if factor is None:
        factor = torch.linalg.qr(
            torch.randn(channels // power, channels // power, generator=generator, dtype=torch.float64)
        ).Q
    rest = torch.ones(1, 1, dtype=torch.float64)
    while len(factor) * len(rest) < channels:  # Sylvester's construction
        rest = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), rest)
    signs = torch.randint(0, 2, (channels, 1), generator=generator, dtype=torch.float64) * 2 - 1
    return signs * torch.kron(factor.contiguous(), rest / len(rest) ** 0.5)


def hadamard(order: int) -> Tensor | None:
    """A Hadamard matrix with entries of size 1 / sqrt(order), by Paley's second construction (1933), or None.

    It exists for an order 2 (q + 1) with a prime q = 1 mod 4, and for the order 1.
    """
    if order == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    prime = order // 2 - 1
    if order % 8 != 4 or prime < 2 or any(prime % divisor == 0 for divisor in range(2, math.isqrt(prime) + 1)):
        return None
    squares = torch.zeros(prime, dtype=torch.bool)
    squares[torch.arange(1, prime).square() % prime] = True
    character = squares.double() * 2 - 1
    character[0] = 0
    numbers = torch.arange(prime)
    conference = torch.ones(prime + 1, prime + 1, dtype=torch.float64)
    conference[0, 0] = 0
    conference[1:, 1:] = character[(numbers[:, None] - numbers) % prime]
    pairs = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    other = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    matrix = torch.kron(conference, pairs) + torch.kron(torch.eye(order // 2, dtype=torch.float64), other)
    return matrix / order**0.5
