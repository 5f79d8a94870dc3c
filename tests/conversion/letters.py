"""Tokenizers whose tokens are letters: each has as much of the interface as its tests need."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


class Words:
    """For rows."""

    pad_token: str | None = "_"
    eos_token = "."

    def __call__(self, text: str, pair: str = "", **options: Any) -> dict[str, list[int]]:
        ids = [4 + ord(letter) % 50 for letter in text + pair]
        ids = ids[: options["max_length"]] if options.get("truncation") else ids
        return {"input_ids": ids} | (
            {} if options.get("add_special_tokens") is False else {"attention_mask": [1] * len(ids)}
        )

    def pad(self, given: list[dict[str, Any]], return_tensors: str) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in given)
        return {
            name: torch.tensor([list(row[name]) + [0] * (longest - len(row[name])) for row in given])
            for name in given[0]
        }


class Letters:
    """For the texts that a sink is looked for in."""

    all_special_ids = (0, 1)

    def __call__(self, text: str, **_: Any) -> Any:
        return SimpleNamespace(input_ids=[ord(letter) % 60 + 3 for letter in text])

    def decode(self, ids: list[int]) -> str:
        return "".join(f"<{each}>" for each in ids)
