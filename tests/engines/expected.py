"""What transformers computes for the texts that vLLM wrote."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def read(model: Any, tokens: list[int]) -> tuple[Tensor, list[int]]:
    """The log-probability of each token but the first, and the most probable token at each of these places."""
    ids = torch.tensor([tokens])
    scores = model(input_ids=ids, use_cache=False).logits[0, :-1].double().log_softmax(-1)
    return scores.gather(-1, ids[0, 1:, None])[:, 0], scores.argmax(-1).tolist()


def differences(model: Any, prompts: list[list[int]], result: dict[str, Any]) -> dict[str, float]:
    """The largest differences of log-probabilities between vLLM's result and transformers, and the texts that differ.

    A text is the greedy one if each of its tokens is the most probable one behind the tokens before.
    """
    found = {"prompt": 0.0, "text": 0.0, "again": 0.0, "other texts": 0.0, "cached": 0.0}
    for prompt, first, again in zip(prompts, result["first"], result["again"], strict=True):
        wanted, best = read(model, prompt + first["tokens"])
        start = len(prompt) - 1
        for name, place, row in (
            ("prompt", 0, first["prompt"]),
            ("text", start, first["text"]),
            ("again", start, again["text"]),
        ):
            gap = (torch.tensor(row, dtype=torch.float64) - wanted[place : place + len(row)]).abs()
            found[name] = max(found[name], float(gap.max()))
        found["other texts"] += best[start:] != first["tokens"] or first["tokens"] != again["tokens"]
        found["cached"] += again["cached"] or 0
    return found
