"""Initial tokens: random in a box, or a text embedded by a model. Axes: N token, E model width."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..text.tokenizer import own_tokenizer
from ..wiring.install import model_root


def random_tokens(count: int, width: int, *, low: float = -5.0, high: float = 5.0, seed: int = 0) -> Tensor:
    """Random tokens (N,E), uniform in [low, high]^E, in float64.

    Raises:
        ValueError: the count or the width is below 1, or `low` is not below `high`.
    """
    if count < 1 or width < 1 or not low < high:
        raise ValueError(
            f"tokens need a count and a width of at least 1 and low < high, got {count}, {width}, {low}, {high}."
        )
    generator = torch.Generator().manual_seed(seed)
    return low + (high - low) * torch.rand(count, width, generator=generator, dtype=torch.float64)


@torch.no_grad()
def embedded_tokens(model: Any, tokenizer: Any, text: str) -> tuple[Tensor, list[str]]:
    """The embedded tokens of a text, (N,E) in float64, as the model's first layer reads them; and the tokens as text.

    Raises:
        ValueError: the text has no tokens.
    """
    root = model_root(model)
    encoded = own_tokenizer(tokenizer)(text, return_tensors="pt", truncation=True).to(next(root.parameters()).device)
    if not encoded["input_ids"].numel():
        raise ValueError("the text has no tokens; pass another text.")
    was = root.training
    root.eval()
    try:
        outputs = root(**encoded, output_hidden_states=True)
    finally:
        root.train(was)
    return outputs.hidden_states[0][0].double(), tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist())
