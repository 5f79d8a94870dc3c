"""Small models that are made of models: pairs of encoder and decoder, towers, and a language model that sees images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import Tensor, nn

from hf_attn_swap.doctor import SCALE
from hf_attn_swap.families import sites
from hf_attn_swap.layer.registry import parse
from tests import zoo
from tests.harness.places import one_per_place, turns

TEXT = zoo.ENCODER | dict(num_hidden_layers=2)
IMAGE = zoo.IMAGE | dict(intermediate_size=48)
QUIET = TEXT | zoo.NO_DROPOUT


def _pair() -> Any:
    decoder = T.BertConfig(**QUIET, is_decoder=True, add_cross_attention=True)
    return T.EncoderDecoderModel(T.EncoderDecoderConfig.from_encoder_decoder_configs(T.BertConfig(**QUIET), decoder))


def _clip() -> Any:
    text = TEXT | zoo.TOKENS
    return T.CLIPModel(T.CLIPConfig(text_config=text, vision_config=IMAGE, projection_dim=16))


def _llava() -> Any:
    text = T.LlamaConfig(**TEXT, **zoo.TOKENS, num_key_value_heads=2)
    vision = T.CLIPVisionConfig(**IMAGE | dict(num_hidden_layers=2))
    return T.LlavaForConditionalGeneration(T.LlavaConfig(vision_config=vision, text_config=text, image_token_index=5))


# By the name of the whole: how it is made, and the paths of its parts.
WHOLES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "pair": (_pair, ("encoder", "decoder")),
    "clip": (_clip, ("text_model", "vision_model")),
    "llava": (_llava, ("model", "model.language_model", "model.vision_tower")),
    "t5": (lambda: zoo.build("t5"), ("encoder",)),
    "whisper": (lambda: zoo.build("whisper"), ("model", "model.encoder", "model.decoder")),
}
if not sites(zoo.build("t5")):  # an older transformers, where T5 computes attention in its own code
    del WHOLES["t5"]
PARTS = [(whole, path) for whole, (_, paths) in WHOLES.items() for path in paths]

# The parts and the places take turns. A position bias has no place in a variant without scores.
CELLS = [
    (whole, path, variant)
    for (whole, path), variant in turns(PARTS, one_per_place())
    if whole != "t5" or not parse(variant)[0].replaces
]


def make(name: str) -> Any:
    """A stock model of one's own; equal names give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = WHOLES[name][0]().eval()
        if name not in zoo.SPECS:
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    if parameter.dim() >= 2 and "embed" not in key:
                        parameter.mul_(SCALE)
    return model


def out(part: nn.Module) -> Tensor:
    """A part's output for fixed inputs."""
    generator = torch.Generator().manual_seed(3)
    batch: dict[str, Tensor] = {"input_ids": torch.randint(6, zoo.VOCABULARY, (2, 6), generator=generator)}
    if part.main_input_name == "pixel_values":
        batch = {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    elif part.main_input_name == "input_features":
        ids = batch["input_ids"]
        batch = {"input_features": torch.randn(2, 8, 20, generator=generator)}
        if part.config.is_encoder_decoder and hasattr(part, "get_decoder") and part.get_decoder() is not part:
            batch["decoder_input_ids"] = ids
    with torch.no_grad():
        result = part(**batch)
    return zoo.output(result)
