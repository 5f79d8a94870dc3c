"""Greedy generation of a few tokens, with a cache and without: equal token for token, and in logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests import zoo
from tests.contract.cells import Cell
from tests.contract.harness import TOLERANCE, distance, swapped

NEW = 5
PROMPT = 6


def model_of(family: str, cell: Cell, strength: float = 1.0) -> Any:
    model = swapped(family, cell, strength)
    model.generation_config.eos_token_id = None  # always NEW tokens
    return model


def prompt_of(family: str, padded: str | None = None) -> dict[str, Any]:
    prompt = zoo.inputs(family, batch=2, length=PROMPT, padded=padded)
    return {**prompt, "attention_mask": prompt.get("attention_mask", torch.ones_like(prompt["input_ids"]))}


def generate(model: Any, prompt: dict[str, Any], **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Tokens (B,L) and the logits of the new ones (NEW,B,V)."""
    out = model.generate(
        **prompt,
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **kwargs,
    )
    return out.sequences, torch.stack(out.logits)


def assert_equal_generation(model: Any, prompt: dict[str, Any], cached: dict[str, Any], **both: Any) -> None:
    wanted_tokens, wanted = generate(model, prompt, use_cache=False, **both)
    tokens, logits = generate(model, prompt, use_cache=True, **cached, **both)
    assert tokens.shape[1] == PROMPT + NEW
    assert torch.equal(tokens, wanted_tokens)
    assert distance(logits, wanted) <= TOLERANCE[torch.float64]
