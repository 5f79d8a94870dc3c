"""What the tests of `convert` share: rows of tiny models, a short conversion, and what a model was before."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_attn_swap.conversion.config import Distil
from hf_attn_swap.conversion.convert import convert
from hf_attn_swap.conversion.report import ConversionReport
from tests.contract.harness import batch_of, fresh

from .distilling import rows_of

BODY = Distil(learning_rate=3e-3, hidden=1.0, batch=8)
CALM = Distil(learning_rate=1e-4, hidden=1.0, batch=8)  # never diverges
ADAPTERS = Distil(learning_rate=5e-3, rank=4, batch=8)
HOW = {"bert": BODY, "albert": BODY, "llama": ADAPTERS, "gpt2": ADAPTERS, "vit": ADAPTERS, "t5": BODY}


def stock(name: str, **overrides: Any) -> Any:
    return fresh(name, torch.float32, **overrides)


def rows(name: str, count: int = 24, first: int = 0) -> list[dict[str, Any]]:
    """Rows of random tokens or pixels, two per seed."""
    made: list[dict[str, Any]] = []
    for seed in range(first, first + (count + 1) // 2):
        made += rows_of(batch_of(name, torch.float32, seed=seed), 1)
    return made[:count]


WINDOW = {"window": 4, "sinks": 1}
GAIN = 3.0  # what the stock model recalls, instead of a measured number


def long() -> Any:
    """A language model with room for passages."""
    return stock("llama", max_position_embeddings=512)


def text(count: int = 24, length: int = 64) -> list[dict[str, Any]]:
    """Rows of random tokens for it."""
    generator = torch.Generator().manual_seed(5)
    return [{"input_ids": torch.randint(4, 64, (length,), generator=generator)} for _ in range(count)]


def converted(model: Any, variant: str, data: Any, **more: Any) -> ConversionReport:
    """A conversion of a few steps."""
    how = HOW.get(model.config.model_type)
    usual = {"tokens": 200, "progress": False, "stages": None if how is None else [how]}
    return convert(model, variant, data, **(usual | more))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Equal names, and equal numbers to the bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def timeless(report: ConversionReport) -> dict[str, Any]:
    """The report without the seconds."""
    found = report.to_dict()
    for step in found["steps"]:
        del step["seconds"]
    return found


def names(report: ConversionReport) -> list[str]:
    """Its steps, in order."""
    return [row.name for row in report.steps]


class Killed(BaseException):
    """The process ends."""
