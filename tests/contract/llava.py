"""A tiny model of images and text."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T

IMAGE_TOKEN = 5


def llava() -> Any:
    """A vision tower of two layers, whose attention is bidirectional, in front of a Llama of three."""
    sizes: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4)
    vision = T.CLIPVisionConfig(**sizes, num_hidden_layers=2, image_size=16, patch_size=8)
    text = T.LlamaConfig(**sizes, vocab_size=60, num_hidden_layers=3, num_key_value_heads=2, pad_token_id=0)
    config = T.LlavaConfig(vision_config=vision, text_config=text, image_token_id=IMAGE_TOKEN)
    torch.manual_seed(0)
    return T.LlavaForConditionalGeneration(config).double().eval()
