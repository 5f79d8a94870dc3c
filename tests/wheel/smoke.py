"""Tries an installed wheel that has no extras: patch, save, load, and the texts that come from templates.

Run it with `python -I`, so that Python does not find the package in this folder.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, BertConfig, BertForSequenceClassification

import hf_attn_swap
from hf_attn_swap.publish.card import commands_beside, render
from hf_attn_swap.publish.results import RunResult

ROOT = Path(__file__).resolve().parents[2]
SIZES = dict(vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)


def round_trip(variant: str) -> None:
    """A model with this variant gives the same logits after it was saved and loaded."""
    model = hf_attn_swap.patch_model(BertForSequenceClassification(BertConfig(**SIZES)).eval(), variant)
    rows = torch.arange(12).view(2, 6)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        again = AutoModelForSequenceClassification.from_pretrained(folder)
        assert torch.equal(again(input_ids=rows).logits, model(input_ids=rows).logits), variant


def cards() -> int:
    """Render every published card; return their number."""
    results = sorted((ROOT / "model_cards").glob("*/results.json"))
    for path in results:
        card = render(RunResult.load(path), commands=commands_beside(path))
        assert card == (path.parent / "README.md").read_text(encoding="utf-8"), path
    return len(results)


if __name__ == "__main__":
    assert "site-packages" in Path(hf_attn_swap.__file__).parts, hf_attn_swap.__file__
    for name in hf_attn_swap.list_variants():
        round_trip(name)
    print(f"{hf_attn_swap.__file__}: {len(hf_attn_swap.list_variants())} variants, {cards()} cards")
