"""The models that `bench.py` measures, their inputs, and one timed pass through a model.

The weights are random, and the vocabulary is tiny, so that the layers take most of the time. Dropout is off. For a
width of 768, BERT and GPT-2 have 12 heads, the Llama has 12 heads that share 4 key/value heads, and the ViT has half
the width (ViT-S).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from bench_caches import cache_of, with_cache
from torch import Tensor

CAUSAL = ("gpt2", "llama")
MODELS = ("bert", *CAUSAL, "vit")
KINDS = {"forward": "forward", "train": "training step", "prefill": "prefill", "decode": "decode"}
PATCH = 16
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def kinds_of(model: str, wanted: str) -> list[str]:
    """The wanted kinds of pass that this model has."""
    return [kind for kind in wanted.split(",") if model in CAUSAL or kind in ("forward", "train")]


def side(length: int) -> int:
    """The number of patches along a side of an image of about `length` tokens."""
    return max(1, round((length - 1) ** 0.5))


def tokens(model: str, length: int) -> int:
    """The number of tokens that this model sees. A ViT has a square number of patches, and one class token."""
    return side(length) ** 2 + 1 if model == "vit" else length


def build(model: str, length: int, layers: int, width: int) -> Any:
    """The stock model in eval mode, for sequences of up to `length` + 1 tokens."""
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
    """Inputs of five tokens, for a model that was built for any length."""
    given = inputs(model, 1, 5, device, dtype)
    return {**given, "interpolate_pos_encoding": True} if model == "vit" else given


@torch.no_grad()
def filled(model: Any, given: Mapping[str, Any]) -> Any:
    """The model's cache after these inputs."""
    return cache_of(model(**given, use_cache=True))


def seconds(model: Any, given: Mapping[str, Any], kind: str, cache: Any = None, clock: str = "wall") -> float:
    """Seconds of one pass. "decode" reads one token and a copy of `cache`; "train" includes the backward pass."""
    now = CLOCKS[clock]
    model.zero_grad()
    words: dict[str, Any] = dict(given)
    if kind == "decode":
        words = {"input_ids": given["input_ids"][:, -1:], **with_cache(model, copy.deepcopy(cache))}
    if kind in ("prefill", "decode"):
        words["use_cache"] = True
    cuda = next(iter(given.values())).is_cuda
    if cuda:
        torch.cuda.synchronize()
    start = now()
    with torch.set_grad_enabled(kind == "train"):
        out = model(**words).last_hidden_state
        if kind == "train":
            out.square().mean().backward()
    if cuda:
        torch.cuda.synchronize()
    return now() - start
