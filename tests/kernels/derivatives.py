"""What the tests of second derivatives and of `torch.func` share: small models, their weights, and a comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from hf_attn_swap import patch_model
from tests import zoo
from tests.contract.harness import fresh, perturb

EXACT = 1e-9
KINDS = ("outeffhop", "sink", "modern_hopfield", "entmax15", "simpletron_resl")  # one variant per kernel
BATCH, LENGTH = 2, 5


def model_of(family: str, name: str, strength: float = 1.0, **config: Any) -> Any:
    return perturb(patch_model(fresh(family, num_hidden_layers=2, **config), name, strength=strength)).eval()


def projections(model: Any) -> dict[str, Tensor]:
    """The weights of the projections of queries, keys and values."""
    ends = tuple(f"{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "query", "key", "value"))
    return {name: weight for name, weight in model.named_parameters() if name.endswith(ends)}


def loss_of(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> Tensor:
    return zoo.output(model(**batch, **kwargs)).square().mean()


def directions(tensors: Iterable[Tensor], seed: int = 4) -> list[Tensor]:
    """Random tensors of these shapes."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor) for tensor in tensors]


def assert_close(got: Any, wanted: Any) -> None:
    scale = max(float(tensor.detach().abs().max()) for tensor in wanted)
    assert scale > 0
    for tensor, right in zip(got, wanted, strict=True):
        assert float((tensor - right).detach().abs().max()) <= EXACT * scale


@contextlib.contextmanager
def math_kernel() -> Iterator[None]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
