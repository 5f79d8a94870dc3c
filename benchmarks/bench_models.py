"""The models that `bench.py` measures, what they are given, and one timed pass through one of them.

Random weights and a tiny vocabulary, so that the layers are what is measured; dropout is off. For a width of 768: BERT
and GPT-2 with 12 heads, a Llama with 12 heads that share 4 key/value heads, and a ViT of half that width (ViT-S).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor

CAUSAL = ("gpt2", "llama")
MODELS = ("bert", *CAUSAL, "vit")
KINDS = {"forward": "forward", "train": "training step", "prefill": "prefill", "decode": "decode"}
PATCH = 16


def kinds_of(model: str, wanted: str) -> list[str]:
    """Those of the wanted kinds that this model has."""
    return [kind for kind in wanted.split(",") if model in CAUSAL or kind in ("forward", "train")]


def side(length: int) -> int:
    """Patches along a side of the image that makes about `length` tokens."""
    return max(1, round((length - 1) ** 0.5))


def tokens(model: str, length: int) -> int:
    """Tokens that this model sees: a ViT has a square number of patches, and one token more."""
    return side(length) ** 2 + 1 if model == "vit" else length


def build(model: str, length: int, layers: int, width: int) -> Any:
    """The stock model, in eval mode, for sequences of `length` and one token more."""
    torch.manual_seed(0)
    width = width // 2 if model == "vit" else width
    heads = max(1, width // 64)
    sizes: dict[str, Any] = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    text = {**sizes, "vocab_size": 100, "max_position_embeddings": length + 1, "use_cache": False}
    config: Any
    if model == "bert":
        config = transformers.BertConfig(**text, intermediate_size=4 * width)
    elif model == "gpt2":
        config = transformers.GPT2Config(**text, bos_token_id=0, eos_token_id=1)
    elif model == "llama":
        shared = heads // 3 if heads % 3 == 0 else 1
        config = transformers.LlamaConfig(**text, intermediate_size=8 * width // 3, num_key_value_heads=shared)
    else:
        image = {"image_size": PATCH * side(length), "patch_size": PATCH}
        config = transformers.ViTConfig(**sizes, **image, intermediate_size=4 * width)
    return transformers.AutoModel.from_config(config).eval()


def inputs(model: str, batch: int, length: int, device: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Random tokens, or random images."""
    if model == "vit":
        size = PATCH * side(length)
        pixels = torch.rand(batch, 3, size, size, device=device, dtype=dtype)
        return {"pixel_values": pixels}
    return {"input_ids": torch.randint(0, 100, (batch, length), device=device)}


def little(model: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The same for five tokens, whatever length the model was built for."""
    given = inputs(model, 1, 5, device, dtype)
    return {**given, "interpolate_pos_encoding": True} if model == "vit" else given


@torch.no_grad()
def filled(model: Any, given: Mapping[str, Any]) -> Any:
    """The cache after these tokens."""
    return model(**given, use_cache=True).past_key_values


def seconds(model: Any, given: Mapping[str, Any], kind: str, cache: Any = None) -> float:
    """What one pass takes: "decode" reads one token and a copy of `cache`, "train" has its backward pass."""
    model.zero_grad()
    words: dict[str, Any] = dict(given)
    if kind == "decode":
        words = {"input_ids": given["input_ids"][:, -1:], "past_key_values": copy.deepcopy(cache)}
    if kind in ("prefill", "decode"):
        words["use_cache"] = True
    cuda = next(iter(given.values())).is_cuda
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.set_grad_enabled(kind == "train"):
        out = model(**words).last_hidden_state
        if kind == "train":
            out.square().mean().backward()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
