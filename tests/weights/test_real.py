"""The same exactness on real pretrained weights: MiniLM, SmolLM2-135M, a ViT-S and a small ALBERT."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from hf_attn_swap import list_variants, patch_model, unpatch_model
from hf_attn_swap.swap import Swap

FOLDER = os.environ.get("HF_ATTN_SWAP_MODELS", "")
TEXT = ["The capital of France is Paris, and that is all there is to say.", "Attention moves tokens."]
MODELS = {
    "minilm": "AutoModel",
    "smollm2": "AutoModelForCausalLM",
    "vit": "AutoModel",
    "albert_rxn": "AutoModelForMaskedLM",
}
pytestmark = [
    pytest.mark.weights,
    pytest.mark.skipif(not FOLDER, reason="HF_ATTN_SWAP_MODELS names no folder with real checkpoints"),
]


@cache
def loaded(name: str) -> tuple[Any, dict[str, Tensor]]:
    """A checkpoint and real inputs for it, the shorter text padded on its model's side."""
    path = Path(FOLDER) / name
    if not path.is_dir():
        pytest.skip(f"{name} is not in HF_ATTN_SWAP_MODELS")
    model = getattr(transformers, MODELS[name]).from_pretrained(path).eval()
    if name == "vit":
        generator = torch.Generator().manual_seed(0)
        return model, {"pixel_values": torch.randn(2, 3, 224, 224, generator=generator)}
    if name == "albert_rxn":
        ids = torch.arange(12, 40).repeat(2, 1) % model.config.vocab_size
        mask = torch.ones_like(ids)
        mask[1, -6:] = 0
        return model, {"input_ids": ids, "attention_mask": mask}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if name == "smollm2":
        tokenizer.padding_side = "left"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, dict(tokenizer(TEXT, padding=True, return_tensors="pt"))


def run(model: Any, batch: dict[str, Tensor], **kwargs: Any) -> Tensor:
    """Outputs of real tokens."""
    with torch.no_grad():
        result = model(**batch, **kwargs)
    out: Tensor = result.logits if "logits" in result else result.last_hidden_state
    return out[batch["attention_mask"].bool()] if "attention_mask" in batch else out


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("variant", list_variants())
@pytest.mark.parametrize("name", MODELS)
def test_exact_at_zero_fused_at_one_and_back(name: str, variant: str) -> None:
    model, batch = loaded(name)
    stock = run(model, batch)
    patch_model(model, variant, strength=0.0)
    try:
        assert torch.equal(run(model, batch), stock)
        for swap in (module for module in model.modules() if isinstance(module, Swap)):
            swap.phase = "between"
        assert relative(run(model, batch), stock) <= 2e-5
        patch_model(model, variant)
        swapped = run(model, batch)
        assert torch.isfinite(swapped).all()
        assert (
            relative(swapped, run(model, batch, output_attentions=True)) <= 1e-3
            if variant.startswith("simple")
            else 2e-5
        )
        assert (relative(swapped, stock) > 1e-4) == (variant not in ("softmax", "gated"))
    finally:
        unpatch_model(model)
    assert torch.equal(run(model, batch), stock)


@pytest.mark.parametrize("variant", list_variants())
def test_padding_does_not_matter(variant: str) -> None:
    model, batch = loaded("minilm")
    alone = {key: value[1:, : int(batch["attention_mask"][1].sum())] for key, value in batch.items()}
    patch_model(model, variant)
    try:
        with torch.no_grad():
            padded = model(**batch).last_hidden_state[1, : alone["input_ids"].shape[1]]
            single = model(**alone).last_hidden_state[0]
    finally:
        unpatch_model(model)
    assert relative(padded, single) <= 2e-5


@pytest.mark.parametrize("variant", list_variants())
def test_cached_generation_equals_uncached(variant: str) -> None:
    path = Path(FOLDER) / "stories260k"
    if not path.is_dir():
        pytest.skip("stories260k is not in HF_ATTN_SWAP_MODELS")
    model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    patch_model(model, variant, strength=0.3)
    ids = torch.tensor([[1, 403, 407, 261, 378], [1, 410, 259, 261, 378]])
    kwargs = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    uncached = model.generate(ids, use_cache=False, **kwargs)
    cached = model.generate(ids, use_cache=True, **kwargs)
    assert torch.equal(cached.sequences, uncached.sequences)
    for got, wanted in zip(cached.logits, uncached.logits, strict=True):
        assert relative(got, wanted) <= 2e-5


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, batch = loaded(name)
    patch_model(model, "outeffhop+gated", strength=0.5)
    try:
        wanted = run(model, batch)
        model.save_pretrained(tmp_path)
    finally:
        unpatch_model(model)
    assert torch.equal(run(type(model).from_pretrained(tmp_path).eval(), batch), wanted)
