"""What transformers computes: the greedy text after each prompt, and the log-probabilities of all tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def log_probs(model: Any, tokens: list[int]) -> Tensor:
    """The log-probability of each token but the first."""
    ids = torch.tensor([tokens])
    scores = model(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The tokens that transformers generates after a prompt, with its cache."""
    made = model.generate(torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return made[0, len(prompt) :].tolist()


def differences(model: Any, prompts: list[list[int]], result: dict[str, Any]) -> dict[str, float]:
    """The largest differences of log-probabilities between vLLM's result and transformers, and the texts that differ.

    The log-probabilities are those of vLLM's own text, so that they are compared at every token of it.
    """
    found = {"prompt": 0.0, "text": 0.0, "again": 0.0, "other texts": 0.0, "cached": 0.0}
    for prompt, first, again in zip(prompts, result["first"], result["again"], strict=True):
        count = len(first["tokens"])
        wanted = log_probs(model, prompt + first["tokens"])
        for name, start, row in (
            ("prompt", 0, first["prompt"]),
            ("text", len(prompt) - 1, first["text"]),
            ("again", len(prompt) - 1, again["text"]),
        ):
            gap = (torch.tensor(row, dtype=torch.float64) - wanted[start : start + len(row)]).abs().max()
            found[name] = max(found[name], float(gap))
        found["other texts"] += greedy(model, prompt, count) != first["tokens"] or first["tokens"] != again["tokens"]
        found["cached"] += again["cached"] or 0
    return found
