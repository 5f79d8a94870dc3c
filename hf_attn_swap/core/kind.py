"""The kinds of attention modules, by what they read. The papers publish some options by kind."""

from __future__ import annotations

from enum import Enum


class Kind(Enum):
    """What a self-attention module reads.

    Members:
        DECODER: tokens in causal order (OPT, GPT-2, LLaMA).
        IMAGE: the patches of an image (ViT).
        ENCODER: everything else, such as text in both directions (BERT, ALBERT).
    """

    DECODER = "decoder"
    IMAGE = "image"
    ENCODER = "encoder"
