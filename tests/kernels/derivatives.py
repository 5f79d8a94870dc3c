"""What the tests of second derivatives and of `torch.func` share: small models, their weights, and a comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hf_attn_swap import patch_model
from tests import zoo
from tests.contract.harness import fresh, perturb

EXACT = 1e-9
FAMILIES = ("bert", "llama")
BOTH = [("llama", 1.0), ("bert", 0.5)]  # a family and a strength

BATCH, LENGTH = 2, 5


def model_of(family: str, name: str, strength: float = 1.0, **config: Any) -> Any:
    return perturb(patch_model(fresh(family, num_hidden_layers=2, **config), name, strength=strength)).eval()


def inner(model: Any, kinds: tuple[str, ...] = ("q", "k", "v")) -> dict[str, Tensor]:
    """The weights of the projections of queries, keys and values."""
    ends = tuple(f"{kind}_proj.weight" for kind in kinds) + tuple(
        f"{word}.weight" for word in ("query", "key", "value")
    )
    return {name: weight for name, weight in model.named_parameters() if name.endswith(ends)}


def loss_of(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> Tensor:
    return zoo.output(model(**batch, **kwargs)).square().mean()


def like(tensors: Any, seed: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(each.shape, generator=generator, dtype=torch.float64).to(each) for each in tensors]


def assert_close(got: Any, wanted: Any) -> None:
    scale = max(float(each.detach().abs().max()) for each in wanted)
    assert scale > 0
    for own, other in zip(got, wanted, strict=True):
        assert float((own - other).detach().abs().max()) <= EXACT * scale


@contextlib.contextmanager
def math_kernel() -> Iterator[None]:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        yield
