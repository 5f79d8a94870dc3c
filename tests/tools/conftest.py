"""Tiny converted models with a tokenizer of bytes, as folders that other people's tools load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_attn_swap import patch_model
from tests import zoo

SPECIAL = ("<s>", "</s>", "<pad>", "<mask>")
CHAT = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def byte_tokenizer(padding_side: str) -> PreTrainedTokenizerFast:
    """One token per byte, after four special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: place for place, token in enumerate((*SPECIAL, *letters))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = dict(zip(("bos_token", "eos_token", "pad_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, padding_side=padding_side, **names)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """Makes a folder with a converted model of some architecture, whose weights are random, and its tokenizer."""

    def make(architecture: str, variant: str, head: str | None = None, **config: Any) -> Path:
        tokenizer = byte_tokenizer("left" if architecture in zoo.CAUSAL else "right")
        tokenizer.chat_template = CHAT if architecture in zoo.CAUSAL else None  # sentence-transformers would apply it
        tokens = dict(bos_token_id=0, eos_token_id=1, pad_token_id=2)
        sizes = dict(vocab_size=len(tokenizer), max_position_embeddings=128)
        model = zoo.build(architecture, torch.float32, head=head, **sizes, **tokens, **config)
        patch_model(model, variant)
        folder = tmp_path / f"{architecture}-{variant}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make
