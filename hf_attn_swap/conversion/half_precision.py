"""Half precision on a processor without instructions for it: one line says so, before a conversion takes hours."""

from __future__ import annotations

import logging
import timeit

import torch
from transformers import PreTrainedModel

LOGGER = logging.getLogger("hf_attn_swap")
SLOW = 4  # times as long as in float32
SENTENCE = (
    "This processor has no fast products in %s: they take %.0f times as long as in float32. Load the model in float32 "
    '(dtype="float32", or --dtype float32).'
)


def tell_if_slow(model: PreTrainedModel) -> None:
    """Log one line if the weights are in half precision, and this CPU multiplies them far slower than float32."""
    if model.device.type != "cpu" or model.dtype not in (torch.float16, torch.bfloat16):
        return
    ratio = seconds(model.dtype) / seconds(torch.float32)
    if ratio > SLOW:
        LOGGER.warning(SENTENCE, str(model.dtype).removeprefix("torch."), ratio)


def seconds(dtype: torch.dtype) -> float:
    """The time of a small product, as a backward pass has it: the shortest of three."""
    left, right = torch.ones(64, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    return min(timeit.repeat(lambda: left @ right, number=1, repeat=3))
