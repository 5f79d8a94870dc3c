"""Tiny language models of large weights, so that every change of attention changes their texts, and their tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

from hf_attn_swap import patch_model
from tests.harness.byte_tokenizer import byte_tokenizer

# Kernels of vLLM on a CPU have heads of 32 numbers or more. Qwen2 has biases, and both have groups of heads.
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config}
SIZES = dict(
    vocab_size=260,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.12,
    bos_token_id=0,
    eos_token_id=None,
    pad_token_id=2,
    tie_word_embeddings=False,
)


def stock(family: str) -> PreTrainedModel:
    """A model with random weights and biases."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**SIZES), dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
    return model


def converted(family: str, *swaps: dict[str, Any]) -> PreTrainedModel:
    """A model with these swaps, whose new parameters are not those of the start."""
    model = stock(family)
    for swap in swaps:
        given = dict(swap)
        patch_model(model, given.pop("variant"), **given)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".attn_swap." in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Save a model and the tokenizer of bytes."""
    model.save_pretrained(folder)
    byte_tokenizer("left").save_pretrained(folder)
    return folder
