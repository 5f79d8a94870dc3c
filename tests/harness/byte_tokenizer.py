"""A tokenizer of bytes, and a tiny model beside it: for programs that want both."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, ViTImageProcessor

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


def build(architecture: str, head: str | None = None, **config: Any) -> tuple[Any, Any]:
    """A model with random weights, and its tokenizer of bytes or its image processor."""
    if zoo.SPECS[architecture].kind == "image":
        return zoo.build(architecture, head=head, **config), ViTImageProcessor(size={"height": 16, "width": 16})
    causal = architecture in zoo.CAUSAL
    tokenizer = byte_tokenizer("left" if causal else "right")
    tokenizer.chat_template = CHAT if causal else None  # sentence-transformers would apply it
    sizes = dict(vocab_size=len(tokenizer), max_position_embeddings=128)
    tokens = dict(bos_token_id=0, eos_token_id=1, pad_token_id=2)
    return zoo.build(architecture, head=head, **sizes, **tokens, **config), tokenizer
